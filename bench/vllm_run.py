"""One vLLM engine: token digests pass by pass, output tokens/s, memory. Prints `RESULT {json}` lines (bench/harness.py).

    VLLM_ENABLE_V1_MULTIPROCESSING=0 [ENABLE_KVCACHED=true KVCACHED_IPC_NAME=a] \\
        python -m bench.vllm_run --label native --size 1b --prefix-caching on

With VLLM_ENABLE_V1_MULTIPROCESSING=0 native vLLM repeats itself pass by pass, so digests can be compared between
processes (docs/FIGURES.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench import harness

if TYPE_CHECKING:
    import argparse


class Engine:
    """`vllm.LLM` with its scheduler in this process or in its own."""

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        from vllm import LLM

        options: dict[str, Any] = {
            "model": model,
            "load_format": "dummy" if args.dummy else "auto",
            "skip_tokenizer_init": True,
            "max_model_len": args.max_model_len,
            "enforce_eager": args.eager,
            "enable_prefix_caching": args.prefix_caching == "on",
            "seed": 0,
            "disable_log_stats": True,
        }
        if args.max_running:
            options["max_num_seqs"] = args.max_running
        if args.device == "cuda":  # on a CPU: VLLM_CPU_KVCACHE_SPACE
            options["gpu_memory_utilization"] = args.fraction
            if args.kv_gib is not None:
                options |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": int(args.kv_gib * 2**30)}
        self._llm = LLM(**options)

    def facts(self) -> dict[str, Any]:
        import vllm

        config = self._llm.llm_engine.vllm_config.cache_config
        return {"vllm": vllm.__version__, "kv_tokens": config.num_gpu_blocks * config.block_size}

    def generate(self, prompts: harness.Tokens, output_tokens: int) -> harness.Answer:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return harness.Answer(
            [list(output.outputs[0].token_ids) for output in outputs],
            sum(output.num_cached_tokens or 0 for output in outputs),
        )

    def reset(self) -> bool:
        return self._llm.reset_prefix_cache()

    def close(self) -> None:
        """Ends with this process."""


if __name__ == "__main__":
    harness.drive(harness.parse(__doc__, lambda parser: None), Engine)

"""One SGLang engine: token digests pass by pass, output tokens/s, memory. Prints `RESULT {json}` lines (bench/harness.py).

    [ENABLE_KVCACHED=true KVCACHED_IPC_NAME=a] python -m bench.sglang_run --label native --page-size 16

Triton attention, pytorch sampling, no grammars; CUDA graphs and the overlapping scheduler as natively.

Does it repeat itself? Read in the source of 0.5.17: prompts given as ids reach the scheduler as one message
(`TokenizerManager._should_use_batch_tokenization`), so its batches, and with them the roundings, do not depend on when requests arrive.
`--deterministic` (`enable_deterministic_inference`) makes the tokens independent of the batch too: batch-invariant Triton kernels for
matrix products, norms and softmax, a fixed split of 256 tokens in decode attention, one stage in extend, and long prompts cut at
multiples of 4,096. It goes with Triton attention, the radix cache (`RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND`) and CUDA graphs
(all but the tc_piecewise kind, which is no default for a dense model). These are other kernels than users run: compare both kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench import harness
from demo import model as models

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """What only SGLang has."""
    parser.add_argument("--page-size", type=int, default=1, help="tokens")
    parser.add_argument("--deterministic", action="store_true", help="batch-invariant kernels")


class Engine:
    """`sglang.Engine`: its scheduler is a process of its own."""

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        import sglang

        options: dict[str, Any] = {
            "model_path": model,
            "load_format": "dummy" if args.dummy else "auto",
            "skip_tokenizer_init": True,
            "context_length": args.max_model_len,
            "page_size": args.page_size,
            "disable_radix_cache": args.prefix_caching == "off",
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "enable_deterministic_inference": args.deterministic,
            "disable_cuda_graph": args.eager,
            "max_running_requests": args.max_running,
            "mem_fraction_static": args.fraction,
            "random_seed": 0,
            "log_level": "warning",
        }
        if args.kv_gib is not None:
            token_bytes = models.kv_bytes_per_token(args.size, harness.dtype_of(args.device))
            # Above what the others may take meanwhile: the limit in tokens decides.
            options |= {
                "mem_fraction_static": 0.9,
                "max_total_tokens": int(args.kv_gib * 2**30) // token_bytes,
            }
        if args.device == "cpu":
            options |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
            options |= {"dtype": "float32", "mem_fraction_static": 0.2}
        self._engine = sglang.Engine(**options)

    def facts(self) -> dict[str, Any]:
        info = self._engine.get_server_info()
        return {"sglang": info["version"], "kv_tokens": info["max_total_num_tokens"]}

    def generate(self, prompts: harness.Tokens, output_tokens: int) -> harness.Answer:
        params = {"temperature": 0.0, "max_new_tokens": output_tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        return harness.Answer(
            [list(output["output_ids"]) for output in outputs],
            sum(output["meta_info"]["cached_tokens"] for output in outputs),
        )

    def reset(self) -> bool:
        return self._engine.flush_cache().success

    def close(self) -> None:
        self._engine.shutdown()


if __name__ == "__main__":
    harness.drive(harness.parse(__doc__, arguments), Engine)

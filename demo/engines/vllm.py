"""vLLM, with its scheduler in the caller's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from demo.engine import MODEL_LEN, Engine, Job, dtype_of

if TYPE_CHECKING:
    from demo.workload import Request


class VLLM(Engine):
    """`vllm.LLM`."""

    title = "vLLM"

    @staticmethod
    def environment(device: str) -> dict[str, str]:
        del device  # the variables of the CPU build mean nothing to the other
        return {
            # The scheduler in this process: its batches, and so the roundings on a GPU, repeat from run to run.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def __init__(self, job: Job) -> None:
        import vllm

        self._vllm = vllm
        self._llm: Any = vllm.LLM(**arguments(job))

    @property
    def version(self) -> str:
        return str(self._vllm.__version__)

    @property
    def kv_cache_bytes(self) -> int:
        config = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        block = sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in config.kv_cache_groups)
        return int(config.num_blocks * block)

    def generate(self, requests: list[Request]) -> list[list[int]]:
        params = [
            self._vllm.SamplingParams(
                temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    def close(self) -> None:
        """Nothing: it ends with this process."""


def arguments(job: Job) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    common: dict[str, Any] = {
        "model": job.model_folder,
        "dtype": dtype_of(job.device),
        "max_model_len": MODEL_LEN[job.device],
        "skip_tokenizer_init": True,
        "enable_prefix_caching": job.prefix_caching,
        "disable_log_stats": True,
        "seed": 0,
    }
    if job.device == "cpu":
        return common | {"enforce_eager": True}
    return common | {"gpu_memory_utilization": job.memory_fraction}

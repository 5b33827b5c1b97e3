"""SGLang, whose scheduler is a process that its engine starts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from demo import model
from demo.engine import MODEL_LEN, Engine, Job, dtype_of

if TYPE_CHECKING:
    from demo.workload import Request

CPU_KV_CACHE_BYTES = 1 << 30  # as much as vLLM is given there
FORGET_LIMIT_S = 10.0


class SGLang(Engine):
    """`sglang.Engine`, with attention and sampling that need no kernels beyond those of torch and triton."""

    title = "SGLang"

    @staticmethod
    def environment(device: str) -> dict[str, str]:
        # On a CPU triton runs in its interpreter; there it is for page sizes above 1.
        return {"TRITON_INTERPRET": "1"} if device == "cpu" else {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}

    def __init__(self, job: Job) -> None:
        import sglang

        self._sglang = sglang
        self._token_bytes = token_bytes(job)
        self._engine: Any = sglang.Engine(**arguments(job))

    @property
    def version(self) -> str:
        return str(self._sglang.__version__)

    @property
    def kv_cache_bytes(self) -> int:
        return int(self._engine.get_server_info()["max_total_num_tokens"]) * self._token_bytes

    def generate(self, requests: list[Request]) -> list[list[int]]:
        outputs = self._engine.generate(
            input_ids=[request.prompt for request in requests],
            sampling_params=[
                {"temperature": 0.0, "max_new_tokens": request.max_tokens, "ignore_eos": True}
                for request in requests
            ],
        )
        return [list(output["output_ids"]) for output in outputs]

    def forget(self) -> None:
        # Refused while the scheduler has a batch in flight, which may outlast the last answer by a moment.
        limit = time.monotonic() + FORGET_LIMIT_S
        while not self._engine.flush_cache().success:
            if time.monotonic() > limit:
                raise RuntimeError(f"SGLang did not empty its prefix cache within {FORGET_LIMIT_S:.0f} s")
            time.sleep(0.1)

    def close(self) -> None:
        self._engine.shutdown()


def token_bytes(job: Job) -> int:
    """Bytes of one token's K and V in all layers."""
    return model.kv_bytes_per_token(job.model_size, dtype_of(job.device))


def arguments(job: Job) -> dict[str, Any]:
    """Arguments of `sglang.Engine`."""
    common: dict[str, Any] = {
        "model_path": job.model_folder,
        "dtype": dtype_of(job.device),
        "context_length": MODEL_LEN[job.device],
        "skip_tokenizer_init": True,
        "disable_radix_cache": not job.prefix_caching,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "warning",
    }
    if job.device == "cpu":
        return common | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.2,
            "max_total_tokens": CPU_KV_CACHE_BYTES // token_bytes(job),
        }
    return common | {"attention_backend": "triton", "mem_fraction_static": job.memory_fraction}

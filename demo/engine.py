"""One vLLM engine in a process of its own: `python -m demo.engine JOB EVENTS_FD`, started by `demo.run`.

The job is a JSON object (`Job`); what happens is written to the file descriptor, one JSON object a line, with
the time on the system's monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from demo import model, workload

SETTLE_S = 1.0


@dataclass
class Job:
    """What one engine is to do."""

    model_folder: str
    model_size: str
    device: str  # "cpu" or "cuda"
    prefix_caching: bool
    bursts: int
    requests: int
    pause_s: float
    memory_fraction: float = 0.25  # of the GPU, weights included

    def to_json(self) -> str:
        """The job as one argument."""
        return json.dumps(asdict(self))


def dtype_of(device: str) -> str:
    """float32 on a CPU, where tokens must be exactly equal."""
    return "float32" if device == "cpu" else "bfloat16"


def engine_arguments(job: Job) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    arguments: dict[str, Any] = {
        "model": job.model_folder,
        "dtype": dtype_of(job.device),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": job.prefix_caching,
        "disable_log_stats": True,
        "seed": 0,
    }
    if job.device == "cpu":
        return arguments | {"max_model_len": 1024, "enforce_eager": True}
    return arguments | {"max_model_len": 8192, "gpu_memory_utilization": job.memory_fraction}


def workload_of(job: Job) -> list[list[workload.Request]]:
    """The bursts, sized so that each prompt and its output fit the model length above."""
    max_prompt, max_output = (800, 96) if job.device == "cpu" else (6000, 512)
    return workload.bursts(job.bursts, job.requests, max_prompt=max_prompt, max_output=max_output)


def kv_cache_bytes(llm: Any) -> int:
    """Bytes of the KV cache that the scheduler may hand out: blocks x bytes of a block in every layer."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    block = sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in config.kv_cache_groups)
    return int(config.num_blocks * block)


def main(job: Job, events_fd: int) -> None:
    """Start the engine, run the bursts, report each step."""
    with os.fdopen(events_fd, "w", buffering=1) as events:

        def emit(event: str, **values: Any) -> None:
            events.write(json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n")

        model.write(job.model_folder, job.model_size, dtype_of(job.device))
        import vllm

        llm = vllm.LLM(**engine_arguments(job))
        emit("started", vllm=vllm.__version__, kv_cache_bytes=kv_cache_bytes(llm))
        # Kernels and buffers that are made on first use belong to the start, not to the first burst.
        workload.generate(llm, workload.burst(0, 2, max_prompt=64, max_output=8))
        llm.reset_prefix_cache()
        time.sleep(SETTLE_S)
        emit("rest")
        time.sleep(SETTLE_S)
        for index, requests in enumerate(workload_of(job)):
            emit("burst", index=index, requests=len(requests))
            tokens = workload.generate(llm, requests)
            emit("burst_done", index=index, tokens=tokens)
            time.sleep(job.pause_s)
            emit("paused", index=index)
        emit("finished")


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))

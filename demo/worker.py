"""One engine in a process of its own: `python -m demo.worker JOB EVENTS_FD`, started by `demo.run`.

The job is a JSON object (`demo.engine.Job`); what happens is written to the file descriptor, one JSON object a
line, with the time on the system's monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from demo import model, workload
from demo.engine import Job, dtype_of
from demo.engines import ENGINES

SETTLE_S = 1.0


def workload_of(job: Job) -> list[list[workload.Request]]:
    """The bursts, sized so that each prompt and its output fit `demo.engine.MODEL_LEN`."""
    max_prompt, max_output = (800, 96) if job.device == "cpu" else (6000, 512)
    return workload.bursts(job.bursts, job.requests, max_prompt=max_prompt, max_output=max_output)


def main(job: Job, events_fd: int) -> None:
    """Start the engine, run the bursts, report each step."""
    with os.fdopen(events_fd, "w", buffering=1) as events:

        def emit(event: str, **values: Any) -> None:
            events.write(json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n")

        model.write(job.model_folder, job.model_size, dtype_of(job.device))
        engine = ENGINES[job.engine](job)
        emit("started", version=engine.version, kv_cache_bytes=engine.kv_cache_bytes)
        # Kernels and buffers that are made on first use belong to the start, not to the first burst.
        engine.generate(workload.burst(0, 2, max_prompt=64, max_output=8))
        engine.forget()
        time.sleep(SETTLE_S)
        emit("rest")
        time.sleep(SETTLE_S)
        for index, requests in enumerate(workload_of(job)):
            emit("burst", index=index, requests=len(requests))
            tokens = engine.generate(requests)
            emit("burst_done", index=index, tokens=tokens)
            time.sleep(job.pause_s)
            emit("paused", index=index)
        emit("finished")
        engine.close()


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))

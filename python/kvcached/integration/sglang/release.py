"""When queued GPU work can no longer read a page: epochs.

With overlap scheduling the next batch is launched before the result of the last one is processed, so that a
request can end, and its tokens be freed, while a launched batch still writes one of them. Each batch begins an
epoch when it is launched; an event behind its GPU work ends it. A page emptied meanwhile stays mapped until the
latest epoch begun by then has ended.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from kvcached.integration.sglang.allocator import ElasticAllocator

__all__ = ["begin_step", "end_step", "settle"]

_STEP = "_kvcached_step"


class _Step(NamedTuple):
    """A launched batch."""

    epoch: int
    done: torch.cuda.Event | None


def begin_step(original: Any) -> Any:
    """Replacement of `Scheduler.run_batch`."""

    @functools.wraps(original)
    def run_batch(self: Any, batch: Any, pp_proxy_tensors: Any = None) -> Any:
        allocator = self.token_to_kv_pool_allocator
        if not isinstance(allocator, ElasticAllocator):
            return original(self, batch, pp_proxy_tensors)
        epoch = allocator.memory.begin_epoch()
        result = original(self, batch, pp_proxy_tensors)
        done = None
        if self.device == "cuda":
            done = torch.cuda.Event()
            done.record(self.forward_stream if self.enable_overlap else torch.cuda.current_stream())
        setattr(result, _STEP, _Step(epoch, done))
        return result

    return run_batch


def end_step(original: Any) -> Any:
    """Replacement of `Scheduler.process_batch_result`, which waits for the batch's results."""

    @functools.wraps(original)
    def process_batch_result(self: Any, batch: Any, result: Any) -> Any:
        outcome = original(self, batch, result)
        step = getattr(result, _STEP, None)
        if step is not None:
            allocator = self.token_to_kv_pool_allocator
            if step.done is not None:
                step.done.synchronize()
            allocator.collect()
            allocator.memory.release_through(step.epoch)
        return outcome

    return process_batch_result


def settle(original: Any) -> Any:
    """Replacement of `Scheduler.on_idle`, called over and over while nothing is queued and every result was processed."""

    @functools.wraps(original)
    def on_idle(self: Any) -> Any:
        allocator = self.token_to_kv_pool_allocator
        if isinstance(allocator, ElasticAllocator):
            allocator.settle()
        return original(self)

    return on_idle

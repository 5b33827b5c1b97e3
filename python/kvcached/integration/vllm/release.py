"""When queued GPU work can no longer read a page: epochs.

With asynchronous scheduling the next batch is queued while the last one runs, so that a request can end,
and its blocks be freed, while a queued batch still reads them. Each scheduled batch begins an epoch; the
scheduler processes a batch's output only when its GPU work has ended, and that ends the epoch. A page
emptied meanwhile stays mapped until the latest epoch begun by then has ended. Batches end in the order in
which they were scheduled; one that never comes back is covered by the next that does.

Of several ranks the scheduler hears the output of one. When that has ended its work, the others have ended all of theirs that touches
the KV cache: a layer's attention comes before the sum over all ranks that ends the layer, and the output after the last of those sums.
What they still run reads no page; and each rank waits for its device before it unmaps.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from kvcached.integration.memory import EngineMemory
from kvcached.integration.vllm.demand import wanted_blocks

__all__ = ["begin_step", "end_step", "undisturbed"]

_EPOCH = "_kvcached_epoch"
STARVED_SLEEP_S = 0.001


def begin_step(original: Any) -> Any:
    """Replacement of `Scheduler.schedule`."""

    @functools.wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        memory = EngineMemory.of(self.cache_config)
        if memory is None or memory.pool is None:
            return original(self, *args, **kwargs)
        ledger = self.kv_cache_manager.block_pool.ledger
        with memory.at_rest:
            epoch = memory.begin_epoch()
            ledger.begin_step()
            output = original(self, *args, **kwargs)
            setattr(output, _EPOCH, epoch)
            if ledger.refused or ledger.lacking:
                lacking = wanted_blocks(self, memory.pool.geometry.tokens_per_block) if ledger.refused else 0
                memory.pool.lacks(lacking)
                ledger.lacking = lacking > 0
        if ledger.refused and not output.total_num_scheduled_tokens:
            # Every request waits for memory that others hold: ask again soon, not at once, for each
            # question is a driver call that they have to wait for.
            time.sleep(STARVED_SLEEP_S)
        return output

    return schedule


def end_step(original: Any) -> Any:
    """Replacement of `Scheduler.update_from_output`, which is called once the batch's GPU work has ended."""

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        memory = EngineMemory.of(self.cache_config)
        if memory is None:
            return original(self, scheduler_output, model_runner_output)
        with memory.at_rest:
            result = original(self, scheduler_output, model_runner_output)
            epoch = getattr(scheduler_output, _EPOCH, None)
            if memory.pool is not None and epoch is not None:
                self.kv_cache_manager.block_pool.keep_to_cap()
                _end_epoch(self, memory, epoch)
        return result

    return update_from_output


def _end_epoch(scheduler: Any, memory: EngineMemory, epoch: int) -> None:
    if epoch < memory.latest_epoch and not scheduler.has_unfinished_requests():
        # The batch queued behind this one is the last for now, and whoever drives the engine may never
        # ask for its output: what it reads would stay mapped while the engine idles.
        memory.synchronise()
        epoch = memory.latest_epoch
    memory.release_through(epoch)


def undisturbed(original: Any) -> Any:
    """Replacement of any other method of `Scheduler` that reaches the block pool: no other thread takes blocks meanwhile. What an abort
    leaves in the cache is above the cap as well.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        memory = EngineMemory.of(self.cache_config)
        if memory is None or memory.pool is None:
            return original(self, *args, **kwargs)
        with memory.at_rest:
            result = original(self, *args, **kwargs)
            self.kv_cache_manager.block_pool.keep_to_cap()
        return result

    return method

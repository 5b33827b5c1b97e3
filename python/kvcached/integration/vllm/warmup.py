"""Warm-up of runner V2: block ids that the engine makes up before a scheduler exists.

`warmup_kernels` and `run_mixed_prefill_decode_warmup` number the blocks of their dummy requests 1..N and
really write to them. Sparse ids or not, each such row lies in some page of the range; those pages are
backed while the warm-up lasts and unmapped after it. Runner V1, graph capture and dummy runs touch only
block 0 and padding slots.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from kvcached.integration.rank import RankMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["back_made_up_blocks"]


def back_made_up_blocks(original: Any) -> Any:
    """Replacement of both warm-up functions, which begin with the same two parameters."""

    @functools.wraps(original)
    def warm_up(model_runner: Any, worker_execute_model: Any, *args: Any, **kwargs: Any) -> Any:
        config = model_runner.kv_cache_config
        rank = RankMemory.of(config)
        if rank is None:
            return original(model_runner, worker_execute_model, *args, **kwargs)
        assert rank.plan is not None
        backed: set[int] = set()

        def execute_model(scheduler_output: Any) -> Any:
            backed.update(rank.back_rows(_block_ids(scheduler_output)))
            return worker_execute_model(scheduler_output)

        id_space = config.num_blocks
        config.num_blocks = rank.plan.agreement.num_blocks  # warm-up caps its requests by it
        try:
            return original(model_runner, execute_model, *args, **kwargs)
        finally:
            config.num_blocks = id_space
            rank.unback(backed)

    return warm_up


def _block_ids(scheduler_output: Any) -> Iterator[int]:
    for request in scheduler_output.scheduled_new_reqs:
        for group in request.block_ids:
            yield from group
    for groups in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for group in groups or ():
            yield from group

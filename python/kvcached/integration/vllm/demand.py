"""What an engine's requests would take in all, if there were memory: so much is asked of others that share the device.

What one step is refused is a page or two, and a burst that grew by that from step to step would take its neighbours' help as often.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

__all__ = ["wanted_blocks"]

LOOKED_AT = 64
"""Requests: those that are next. In a step that was refused memory, and only then."""


def wanted_blocks(scheduler: Any, block_tokens: int) -> int:
    """Blocks that the first requests lack for the tokens that are known of them: beyond those that are cached and no request uses, which are
    taken first.

    Args:
        scheduler: vLLM's, in none of its other calls. block_tokens: tokens of a block.
    """
    pool = scheduler.kv_cache_manager.block_pool
    waiting = chain(scheduler.waiting, scheduler.skipped_waiting)
    wanted = 0
    for request in islice(chain(scheduler.running, waiting), LOOKED_AT):
        whole = -(-request.num_tokens // block_tokens)
        has = -(-request.num_computed_tokens // block_tokens)
        if not has:
            has = _found(pool, request)
        wanted += max(0, whole - has)
    return max(0, wanted - int(pool.free_block_queue.num_free_blocks))


def _found(pool: Any, request: Any) -> int:
    """Blocks of a request's beginning that are cached."""
    found = 0
    for block_hash in request.block_hashes:
        if pool.get_cached_block(block_hash, [0]) is None:
            break
        found += 1
    return found

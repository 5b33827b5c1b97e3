"""What the scheduler admits: memory is secured before it decides, so that an allocation cannot fail afterwards.

A failed allocation ends SGLang's scheduler: it relies on what its admission and its decode check have seen.
Each of these therefore names here what it is about to use, and the pages for it are backed before SGLang's own
code runs. Where memory that others hold is missing, requests wait, cached prefixes are evicted and running
requests retracted, all by SGLang's own rules; none is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from itertools import islice
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from kvcached.integration.sglang.allocator import ElasticAllocator
from kvcached.integration.sglang.eviction import adopt

__all__ = [
    "begin_pass",
    "observer_counts_blocks",
    "retracted_not_aborted",
    "secured_chunk",
    "secured_decode",
    "secured_request",
]

STARVED_SLEEP_S = 0.001
LOOKED_AT = 64
"""Requests that wait: those that are next."""
_PARKED = "_kvcached_parked"


def begin_pass(original: Any) -> Any:
    """Replacement of `Scheduler.get_next_batch_to_run`, one pass of the scheduler."""

    @functools.wraps(original)
    def get_next_batch_to_run(self: Any, running_batch: Any, last_batch: Any) -> Any:
        allocator = self.token_to_kv_pool_allocator
        if not isinstance(allocator, ElasticAllocator):
            return original(self, running_batch=running_batch, last_batch=last_batch)
        allocator.collect()
        if allocator.prefixes is not None:
            allocator.prefixes.serve()  # before this pass's epoch: what goes for others need not wait for its batch
        waiting = self.waiting_queue or self.chunked_req is not None
        if waiting or last_batch or not running_batch.is_empty():
            # What is evicted or retracted in this pass is for those that are admitted in it: it stays mapped until
            # their batch, or an idle moment, has ended the epoch. Others would take what leaves before it is allocated.
            allocator.memory.begin_epoch()
        if waiting and running_batch.batch_is_full and allocator.is_short:
            # "Full" was said of memory, which may have come back since; SGLang would wait for a request to end.
            running_batch.batch_is_full = False
        if waiting and not running_batch.batch_is_full:
            allocator.ask_device()
        allocator.refused = False
        plan = original(self, running_batch=running_batch, last_batch=last_batch)
        allocator.lack(_wanted_tokens(self) if waiting and allocator.refused else 0)
        if plan.batch_to_run is None and waiting and allocator.is_short:
            # Every request waits for memory that others hold: ask again soon, not at once, for each question is a
            # driver call that they have to wait for.
            time.sleep(STARVED_SLEEP_S)
        return plan

    return get_next_batch_to_run


def _wanted_tokens(scheduler: Any) -> int:
    """Tokens that those who wait would take in all, as far as they are known, beyond those of cached prefixes that no request uses, which are
    evicted first: so much is asked of others that share the device. What one pass is refused is a page or two. Found prefixes are left out where
    SGLang has looked for them.
    """
    waiting = islice(scheduler.waiting_queue, LOOKED_AT)
    requests = [*waiting, *([scheduler.chunked_req] if scheduler.chunked_req is not None else [])]
    lengths = [len(req.origin_input_ids) + len(req.output_ids) - len(req.prefix_indices) for req in requests]
    return max(0, sum(max(0, length) for length in lengths) - int(scheduler.tree_cache.evictable_size()))


def secured_request(original: Any) -> Any:
    """Replacement of `PrefillAdder.add_one_req`."""

    @functools.wraps(original)
    def add_one_req(self: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
        allocator = self.token_to_kv_pool_allocator
        if isinstance(allocator, ElasticAllocator):
            if getattr(self, _PARKED, False):
                return AddReqResult.OTHER
            needed = self.cur_rem_token_offset + _next_extend(self, req) + self.page_size
            short = allocator.secure(needed)
            # What the request itself would reuse is evictable until it is admitted.
            if short > max(0, self.tree_cache.evictable_size() - len(req.prefix_indices)):
                return AddReqResult.OTHER  # not NO_TOKEN, after which SGLang waits for a request to end
        return original(self, req, has_chunked_req, truncation_align_size)

    return add_one_req


def secured_chunk(original: Any) -> Any:
    """Replacement of `PrefillAdder.add_chunked_req`, which natively takes the chunk whatever there is room for."""

    @functools.wraps(original)
    def add_chunked_req(self: Any, req: Any) -> Any:
        allocator = self.token_to_kv_pool_allocator
        if not isinstance(allocator, ElasticAllocator):
            return original(self, req)
        wanted = _next_extend(self, req)
        short = allocator.secure(self.cur_rem_token_offset + wanted + self.page_size)
        short -= self.tree_cache.evictable_size()
        if short <= 0:
            return original(self, req)
        chunk = (wanted - short) // self.page_size * self.page_size
        if chunk <= 0:
            setattr(self, _PARKED, True)
            return req  # as SGLang itself does where a window has no room: the next pass tries again
        at_most, self.rem_chunk_tokens = self.rem_chunk_tokens, chunk
        try:
            return original(self, req)
        finally:
            self.rem_chunk_tokens += at_most - chunk

    return add_chunked_req


def _next_extend(adder: Any, req: Any) -> int:
    """Tokens, in whole pages, that this request would add to the batch."""
    tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    if adder.rem_chunk_tokens is not None:
        tokens = min(tokens, max(adder.rem_chunk_tokens, 0))
    return int(adder.ceil_paged_tokens(tokens))


def secured_decode(original: Any) -> Any:
    """Replacement of `ScheduleBatch.check_decode_mem`."""

    @functools.wraps(original)
    def check_decode_mem(self: Any, selected_indices: list[int] | None = None) -> bool:
        allocator = self.token_to_kv_pool_allocator
        if isinstance(allocator, ElasticAllocator):
            # The allocation will ask for a page a request before it counts: not to evict for what it does not need.
            at_most = len(self.reqs) * allocator.page_size
            if allocator.available_size() < at_most and allocator.is_short and not allocator.refused:
                allocator.ask_device()
            allocator.secure(self.new_tokens_required_next_decode(selected_indices))
        return bool(original(self, selected_indices))

    return check_decode_mem


def retracted_not_aborted(original: Any) -> Any:
    """Replacement of `ScheduleBatch.retract_decode`, which aborts a request that does not fit alone."""

    @functools.wraps(original)
    def retract_decode(self: Any, server_args: Any) -> Any:
        retracted, ratio, aborted = original(self, server_args)
        allocator = self.token_to_kv_pool_allocator
        if aborted and isinstance(allocator, ElasticAllocator) and allocator.refused:
            for req in aborted:
                req.to_finish = None
            return [*retracted, *aborted], ratio, []
        return retracted, ratio, aborted

    return retract_decode


class _LogicalCount:
    """The allocator as usage and leak checks see it."""

    def __init__(self, allocator: ElasticAllocator) -> None:
        self._allocator = allocator

    def available_size(self) -> int:
        """Tokens that nobody holds."""
        return self._allocator.logical_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._allocator, name)


def observer_counts_blocks(original: Any) -> Any:
    """Replacement of `Scheduler.init_pool_stats_observer`, which is called once when the scheduler has its pools and its tree."""

    @functools.wraps(original)
    def init_pool_stats_observer(self: Any) -> None:
        original(self)
        allocator = self.token_to_kv_pool_allocator
        if isinstance(allocator, ElasticAllocator):
            adopt(self)
            self.pool_stats_observer = dataclasses.replace(
                self.pool_stats_observer, token_to_kv_pool_allocator=_LogicalCount(allocator)
            )

    return init_pool_stats_observer

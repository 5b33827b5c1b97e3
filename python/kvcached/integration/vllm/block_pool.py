"""The scheduler's side: an overlay of vLLM's block pool over the pages that are backed.

vLLM's own structures stay (hash maps, eviction order, reference counts, events, metrics); only which block
without content is handed out is decided here. A block is in one of three places:

* held by requests: in no queue, held in the ledger;
* cached (a prefix-cache hash, no request): in vLLM's free queue, held in the ledger, for its content is
  worth a page;
* free: in the ledger only. vLLM's queue keeps cached blocks and nothing else.

So a block is held in the ledger exactly while its content may be read. The overlay is put on by changing
the class of the live pool and of its queue, after `Scheduler.__init__`: whoever captured the pool (the
managers, a connector) keeps the very same object, and pools of other kinds (CPU offload) are left alone.
The scheduler, and not the KV cache manager, because only it knows which engine it belongs to.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachePoolExhausted, StateConsistencyError
from kvcached.integration.memory import EngineMemory
from kvcached.integration.vllm.eviction import choose_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached import _core

__all__ = ["BlockLedger", "Blocks", "adopt_block_pool", "note_demand", "overlay_block_pool"]


class Blocks:
    """`BlockPool.blocks`: looked up by sparse id, iterated densely; its length is the bound of ids."""

    def __init__(self, items: Sequence[Any], geometry: _core.Geometry, id_space: int) -> None:
        self._items, self._geometry, self._id_space = items, geometry, id_space

    def __getitem__(self, block_id: int) -> Any:
        return self._items[self._geometry.index(block_id)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return self._id_space


class BlockLedger:
    """Block objects by what the ledger says of their ids. One call of the core for each call of vLLM."""

    def __init__(self, pool: _core.Pool, items: Sequence[Any]) -> None:
        geometry = pool.geometry
        for index, block in enumerate(items):
            block.block_id = geometry.block_id(index)
        self.pool = pool
        self.blocks = Blocks(items, geometry, pool.id_space)
        self.free = pool.available_size()
        """Blocks without content, whether their pages are backed or not. Counted here, for the scheduler asks
        several times a request and step; the core is asked again in each step."""
        self.refused = False
        """Memory was refused in this step: not asked for again before the next one."""
        self.lacking = False
        """Others were told that memory is wanted, at the end of the last step."""
        self._items = items
        self._ids_per_page, self._per_page = geometry.ids_per_page, geometry.blocks_per_page
        self._pages = range(geometry.num_pages(pool.num_blocks))
        self.page_bytes = geometry.page_bytes
        self.bytes_per_block = geometry.page_bytes // geometry.blocks_per_page
        """Of a page's memory, over all buffers."""

    def begin_step(self) -> None:
        """A step of the scheduler begins."""
        self.refused = False
        self.free = self.pool.available_size()

    def on_hand(self, wanted: int) -> int:
        """Back pages until `wanted` free blocks are on hand; returns how many are, fewer where memory is
        short. They stay until they are taken or an epoch begins or ends.
        """
        wanted = min(wanted, self.free)
        if wanted == 0:
            return 0
        if not self.refused:
            if self.pool.reserve_demand(wanted) >= wanted:
                return wanted
            self.refused = True
        return self.pool.keep_on_hand(wanted)

    def take(self, count: int) -> list[Any]:
        """`count` free blocks, which must be on hand."""
        if count == 0:
            return []
        ids = self.pool.alloc(count)
        if ids is None:
            raise StateConsistencyError(f"{count} blocks were on hand and cannot be allocated")
        self.free -= count
        items, ids_per_page, per_page = self._items, self._ids_per_page, self._per_page
        return [items[i // ids_per_page * per_page + i % ids_per_page] for i in ids]

    def claim(self, block: Any) -> None:
        """Take this very block, which must be free."""
        self.pool.claim([block.block_id])
        self.free -= 1

    def held_by_page(self) -> list[int]:
        """Blocks that each page holds."""
        return [held for held, _ in self.pool.get_page_occupancy(self._pages)]

    def page_of(self, block: Any) -> int:
        return int(block.block_id) // self._ids_per_page

    def blocks_in(self, page: int) -> Sequence[Any]:
        """All blocks of a page."""
        return self._items[page * self._per_page : (page + 1) * self._per_page]

    def give(self, blocks: Sequence[Any]) -> None:
        """These blocks hold nothing any more."""
        if blocks:
            self.pool.free([block.block_id for block in blocks])
            self.free += len(blocks)


@functools.cache
def _elastic_classes() -> tuple[Any, Any]:
    """Subclasses of vLLM's queue and pool; made when vLLM is there."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue as Queue

    class ElasticQueue(Queue):  # type: ignore[misc]
        """vLLM's queue of cached blocks, oldest first; blocks without a hash come from and go to the
        ledger.
        """

        ledger: BlockLedger
        # `num_free_blocks` counts what is in this queue, as vLLM's methods keep it: cached blocks.

        def popleft(self) -> Any:
            return self.popleft_n(1)[0]

        def popleft_n(self, n: int) -> list[Any]:
            fresh = self.ledger.on_hand(n)
            if n - fresh > self.num_free_blocks:
                raise KVCachePoolExhausted(f"{n} blocks wanted, {fresh + self.num_free_blocks} can be had")
            cached: list[Any] = super().popleft_n(n - fresh)
            return self.ledger.take(fresh) + cached

        def remove(self, block: Any) -> None:
            if block.next_free_block is None and block.block_hash is None:
                self.ledger.claim(block)
            else:
                super().remove(block)

        def append(self, block: Any) -> None:
            self.append_n([block])

        def append_n(self, blocks: list[Any]) -> None:
            super().append_n(self._without_free(blocks))

        def prepend_n(self, blocks: list[Any]) -> None:
            super().prepend_n(self._without_free(blocks))

        def _without_free(self, blocks: list[Any]) -> list[Any]:
            self.ledger.give([block for block in blocks if block.block_hash is None])
            return [block for block in blocks if block.block_hash is not None]

        def get_all_free_blocks(self) -> list[Any]:
            free = [
                block
                for block in self.ledger.blocks
                if block.ref_cnt == 0 and block.block_hash is None and not block.is_null
            ]
            return free + self.cached_blocks()

        def forget(self, blocks: Sequence[Any]) -> None:
            """These cached blocks have lost their hash: they are free now."""
            for block in blocks:
                super().remove(block)
            self.ledger.give(blocks)

        def cached_blocks(self) -> list[Any]:
            return list(super().get_all_free_blocks())

    class ElasticPool(BlockPool):  # type: ignore[misc]
        """vLLM's pool, which learns what a check is for, and of blocks that lose their content in the
        queue.
        """

        is_elastic = True
        ledger: BlockLedger
        demand: tuple[int, int] | None
        most_cached: int | None
        """Blocks that may be cached at the end of a step."""

        @property
        def cached_bytes(self) -> int:
            return int(self.free_block_queue.num_free_blocks) * self.ledger.bytes_per_block

        def evict(self, nbytes: int) -> int:
            """Evict cached blocks so that pages empty, the least recently used first, until these are of `nbytes` or no other page can
            be emptied. Returns the bytes of the pages.

            The scheduler must be at rest: in the middle of a step it may have found blocks that it has not touched yet.
            """
            pages = list(islice(self._pages_of_cached_blocks(), max(0, -(-nbytes // self.ledger.page_bytes))))
            self._evict([block for page in pages for block in self._cached_in(page)])
            return len(pages) * self.ledger.page_bytes

        def keep_to_cap(self) -> None:
            """Evict what is above the cap: whole pages as long as there are such, then the oldest blocks. At rest, as `evict`."""
            queue, cap = self.free_block_queue, self.most_cached
            if cap is None or queue.num_free_blocks <= cap:
                return
            excess = queue.num_free_blocks - cap
            going: list[Any] = []
            pages = self._pages_of_cached_blocks()
            while len(going) < excess and (page := next(pages, None)) is not None:
                going += self._cached_in(page)
            if len(going) < excess:
                ids = {block.block_id for block in going}
                others = (block for block in queue.iter_blocks_after(None) if block.block_id not in ids)
                going += islice(others, excess - len(going))
            self._evict(going)

        def _pages_of_cached_blocks(self) -> Iterator[int]:
            oldest_first = self.free_block_queue.iter_blocks_after(None)
            return choose_pages(map(self.ledger.page_of, oldest_first), self.ledger.held_by_page())

        def _cached_in(self, page: int) -> list[Any]:
            return [block for block in self.ledger.blocks_in(page) if block.next_free_block is not None]

        def _evict(self, blocks: list[Any]) -> None:
            """By vLLM's own method, and with one call of the core."""
            for block in blocks:
                self.free_block_queue.remove(block)
                self._maybe_evict_cached_block(block)
            self.ledger.give(blocks)

        def get_num_free_blocks(self) -> int:
            """Right after a check has counted what it needs: no more than memory can be had for."""
            queue, demand = self.free_block_queue, self.demand
            free: int = queue.num_free_blocks + self.ledger.free
            if demand is None:
                return free
            self.demand = None
            needed, hits = demand
            if needed > free:
                return free
            wanted = min(needed - hits, free - queue.num_free_blocks)
            fresh = self.ledger.on_hand(wanted)
            return free if fresh >= wanted else int(queue.num_free_blocks) + fresh

        def _remove_cached_block_hashes(self, block: Any) -> Any:
            removed = super()._remove_cached_block_hashes(block)
            if block.next_free_block is not None:
                self.free_block_queue.forget([block])
            return removed

        def _insert_block_hash(
            self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None
        ) -> None:
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null:
                # Nobody holds it: it becomes a cached block.
                self.ledger.claim(block)
                super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
                self.free_block_queue.append(block)
            else:
                super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)

        def reset_prefix_cache(self) -> bool:
            cached = self.free_block_queue.cached_blocks()
            if not super().reset_prefix_cache():
                return False
            self.free_block_queue.forget(cached)
            return True

    return ElasticQueue, ElasticPool


def overlay_block_pool(block_pool: Any, pool: _core.Pool) -> None:
    """Put the overlay on a pool that vLLM has just built.

    Args:
        block_pool: vLLM's `BlockPool`, nothing of which is in use but the null block.
        pool: of as many blocks, the null block taken.
    """
    items, queue = list(block_pool.blocks), block_pool.free_block_queue
    if queue.num_free_blocks != len(items) - 1 or len(items) != pool.num_blocks:
        raise StateConsistencyError(
            f"a fresh pool of {len(items)} blocks has {queue.num_free_blocks} free; expected all of "
            f"{pool.num_blocks} but the null block"
        )
    for block in items:
        block.prev_free_block = block.next_free_block = None
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    head.next_free_block, tail.prev_free_block = tail, head

    ledger = BlockLedger(pool, items)
    queue_class, pool_class = _elastic_classes()
    queue.__class__, queue.ledger, queue.num_free_blocks = queue_class, ledger, 0
    block_pool.__class__, block_pool.ledger, block_pool.demand = pool_class, ledger, None
    block_pool.most_cached = None
    block_pool.blocks = ledger.blocks


def adopt_block_pool(original: Any) -> Any:
    """Replacement of `Scheduler.__init__`."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, vllm_config, kv_cache_config, *args, **kwargs)
        memory = EngineMemory.of(vllm_config.cache_config)
        if memory is not None:
            block_pool, pool = self.kv_cache_manager.block_pool, memory.open_pool()
            overlay_block_pool(block_pool, pool)
            tokens = memory.launch.settings.max_cached_tokens
            if tokens is not None:
                block_pool.most_cached = tokens // pool.geometry.tokens_per_block
            memory.adopt_cache(block_pool, lambda: not self.has_unfinished_requests())

    return __init__


def note_demand(original: Any) -> Any:
    """Replacement of `KVCacheCoordinator.get_num_blocks_to_allocate`: what the next look at the free blocks
    is for.

    `allocate_slots` asks for this number and then compares it with `get_num_free_blocks()`, before it has
    touched anything. Memory is secured between the two: a refusal later, in the middle of an allocation,
    would corrupt a request that already has some of its blocks. Hits are part of the number and need no
    memory: their pages are backed.
    """

    @functools.wraps(original)
    def get_num_blocks_to_allocate(self: Any, *args: Any, **kwargs: Any) -> Any:
        needed = original(self, *args, **kwargs)
        if needed and getattr(self.block_pool, "is_elastic", False):  # most requests need none in most steps
            computed = kwargs["new_computed_blocks"] if "new_computed_blocks" in kwargs else args[2]
            hits = sum(block.ref_cnt == 0 and not block.is_null for group in computed for block in group)
            self.block_pool.demand = (needed, min(hits, needed))
        return needed

    return get_num_blocks_to_allocate

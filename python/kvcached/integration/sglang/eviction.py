"""Cached prefixes of SGLang, given back when their memory is wanted: whole pages of ours, in the order of SGLang's own eviction policy.

Whoever wants memory asks from a thread of its own, and SGLang's scheduler evicts in its thread, at the start of a pass or while it idles: its
loop turns whether there is work or not, and what is freed is copied behind the work of that thread's stream. At that moment no request is
about to be admitted; those that run hold locks on their nodes.

The ids of a node lie on the device. They are brought to the host for as many nodes at once as were looked at already, so that a tree of
n nodes costs log n copies, and no more of it is read than the pages that are wanted take.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixCache

from kvcached.integration.sglang.allocator import ElasticAllocator

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CachedPrefixes", "adopt"]

ANSWER_S = 1.0
"""How long who asks waits for the scheduler's next pass. It idles in an even second (`--sleep-on-idle`)."""
FIRST_NODES = 32
"""Looked at at once, then as many as before."""


def adopt(scheduler: Any) -> None:
    """Have the prefixes that this scheduler caches go back when they are wanted. Trees of other classes than SGLang's plain one keep theirs."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    if isinstance(allocator, ElasticAllocator) and type(tree) is RadixCache:
        allocator.prefixes = CachedPrefixes(tree, allocator)
        # An idle engine ends its epochs by itself.
        allocator.memory.adopt_cache(allocator.prefixes, lambda: False)


class CachedPrefixes:
    """A `kvcached.integration.memory.PrefixCache` over SGLang's radix tree.

    Args:
        tree: of the scheduler. allocator: from which its blocks are.
    """

    def __init__(self, tree: RadixCache, allocator: ElasticAllocator) -> None:
        self._tree, self._allocator = tree, allocator
        geometry = allocator.pool.geometry
        self._page_bytes, self._ids_per_page = geometry.page_bytes, geometry.ids_per_page
        self._token_bytes = geometry.block_bytes * geometry.num_buffers // allocator.page_size
        self._most_cached = allocator.memory.launch.settings.max_cached_tokens
        self._change = threading.Condition()
        self._wanted = 0  # bytes, of whoever waits
        self._given: int | None = None

    # ------------------------------------------------------------ any thread

    @property
    def cached_bytes(self) -> int:
        """Memory under tokens that are cached and that no request uses."""
        return int(self._tree.evictable_size()) * self._token_bytes

    def evict(self, nbytes: int) -> int:
        """Have the scheduler's next pass empty pages of `nbytes`, as far as that can be; returns the bytes of those that it did, 0 where it
        does not come. Not called by the scheduler's thread.
        """
        with self._change:
            self._wanted, self._given = nbytes, None
            self._change.wait_for(lambda: self._given is not None, ANSWER_S)
            self._wanted = 0
            return self._given or 0

    # ------------------------------------------------------------ the scheduler's thread

    def serve(self) -> None:
        """At a moment at which no request is about to be admitted: evict what is asked for, and what is above the cap."""
        if self._wanted:
            with self._change:
                wanted, self._wanted = self._wanted, 0
                if wanted:
                    self._given = self._empty_pages(-(-wanted // self._page_bytes)) * self._page_bytes
                    self._change.notify_all()
        if self._most_cached is not None and (excess := self._tree.evictable_size() - self._most_cached) > 0:
            self._tree.evict(EvictParams(num_tokens=excess))

    def _empty_pages(self, num_pages: int) -> int:
        """Evict so that up to so many pages hold nothing any more; returns how many. Nodes that stand in no such page stay."""
        self._allocator.collect(wait=True)  # what is on its way to the ledger is held there no longer
        order: list[Any] = []
        standing: dict[Any, list[int]] = {}
        seen: Counter[int] = Counter()
        emptied: set[int] = set()
        for node, pages in self._in_order_of_eviction():
            order.append(node)
            standing[node] = list(pages)
            for page, held in zip(pages, self._held_by(list(pages)), strict=True):
                seen[page] += pages[page]
                if seen[page] == held:
                    emptied.add(page)
            if len(emptied) >= num_pages:
                break
        going = {node for node, pages in standing.items() if not emptied.isdisjoint(pages)}
        for node in reversed(
            order
        ):  # parents before their children: a node goes with all that it is the beginning of
            if node.parent in going:
                going.add(node)
        for node in order:
            if node in going:
                self._evict_leaf(node)
        self._allocator.collect(wait=True)
        return len(emptied)

    def _in_order_of_eviction(self) -> Iterator[tuple[Any, Counter[int]]]:
        """Nodes as SGLang's `RadixCache.evict` would take them, each with the pages that its blocks are in. Nothing is changed."""
        priority = self._tree.eviction_strategy.get_priority
        heap = [(priority(node), node) for node in self._tree.evictable_leaves]
        heapq.heapify(heap)
        children = Counter[Any]()  # taken, of each node
        count = FIRST_NODES
        while heap:
            nodes: list[Any] = []
            while heap and len(nodes) < count:
                _, node = heapq.heappop(heap)
                nodes.append(node)
                parent = node.parent
                children[parent] += 1
                if children[parent] == len(parent.children) and parent.lock_ref == 0:
                    heapq.heappush(heap, (priority(parent), parent))
            count += len(nodes)
            yield from zip(nodes, self._pages_of(nodes), strict=True)

    def _pages_of(self, nodes: list[Any]) -> list[Counter[int]]:
        """How many blocks of each node are in which page. One copy from the device."""
        size = self._allocator.page_size
        firsts = torch.cat([node.value[::size] for node in nodes]) // size // self._ids_per_page
        pages = firsts.tolist()
        found, at = [], 0
        for node in nodes:
            blocks = len(node.value) // size
            found.append(Counter(pages[at : at + blocks]))
            at += blocks
        return found

    def _held_by(self, pages: list[int]) -> list[int]:
        return [held for held, _ in self._allocator.pool.get_page_occupancy(pages)]

    def _evict_leaf(self, node: Any) -> None:
        """What SGLang's own `evict` does with one."""
        self._tree.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        self._tree._delete_leaf(node)
        self._tree._record_remove_event(node)

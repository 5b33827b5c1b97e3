"""Cached prefixes of SGLang's own radix tree over elastic memory: what goes when pages are wanted, and what stays."""

from __future__ import annotations

import random
import threading
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import BLOCKS_PER_PAGE
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvcached.integration.sglang import eviction
from kvcached.integration.sglang.eviction import CachedPrefixes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.integration.sglang.allocator import ElasticAllocator

PAGE_SIZES = [1, 16]
ALL = 1 << 40


class Cache:
    """A tree over an allocator, and what is known to be in it."""

    def __init__(self, allocator: ElasticAllocator, page_size: int, most_cached: int | None = None) -> None:
        allocator.memory.launch.settings.max_cached_tokens = most_cached
        self.allocator, self.page_size = allocator, page_size
        self.tree = RadixCache.create_simulated(mock_allocator=allocator, page_size=page_size)
        self.prefixes = CachedPrefixes(self.tree, allocator)
        self.page_bytes = allocator.pool.geometry.page_bytes

    def insert(self, start: int, blocks: int, after: list[int] | None = None) -> list[int]:
        """Caches so many blocks of new tokens, after a prefix that is cached already; returns all tokens."""
        prefix = after or []
        tokens = prefix + [start * 10_000 + k for k in range(blocks * self.page_size)]
        found = self.match(tokens)
        assert len(found) == len(prefix)
        indices = self.allocator.alloc(len(tokens) - len(prefix))
        assert indices is not None
        value = torch.cat([found, indices])
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=value))
        return tokens

    def match(self, tokens: list[int]) -> torch.Tensor:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)))).device_indices

    def node(self, tokens: list[int]) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)))).last_device_node

    def pages(self, tokens: list[int]) -> set[int]:
        ids = sorted({int(i) // self.page_size for i in self.match(tokens)})
        return set(self.allocator.pool.pages_of(ids))

    def held_pages(self) -> set[int]:
        pool = self.allocator.pool
        pages = range(pool.ftensor.num_pages)
        occupancy = pool.get_page_occupancy(list(pages))
        return {page for page, (held, _) in zip(pages, occupancy, strict=True) if held}

    def give(self, nbytes: int) -> int:
        """Asks as another thread does; the scheduler's next pass answers."""
        given: list[int] = []
        asking = threading.Thread(target=lambda: given.append(self.prefixes.evict(nbytes)))
        asking.start()
        while asking.is_alive():
            self.prefixes.serve()
            self.check()
        return given[0]

    def check(self) -> None:
        """Whatever the tree holds is held in the ledger, and nothing else is."""
        assert self.tree.total_size() == self.tree.evictable_size() + self.tree.protected_size()
        held = self.allocator.pool.held_size() - 1
        assert held * self.page_size == self.tree.total_size()
        assert self.prefixes.cached_bytes == self.tree.evictable_size() * self.page_bytes // (
            BLOCKS_PER_PAGE * self.page_size
        )


@pytest.fixture(params=PAGE_SIZES)
def cache(request: pytest.FixtureRequest, elastic: Callable[..., ElasticAllocator]) -> Callable[..., Cache]:
    return lambda most_cached=None: Cache(elastic(request.param), request.param, most_cached)


def test_the_least_recently_used_go_first_and_no_more_than_is_wanted(cache) -> None:
    made = cache()
    made.insert(0, BLOCKS_PER_PAGE - 1)  # the rest of the null block's page
    prompts = [made.insert(1 + n, BLOCKS_PER_PAGE) for n in range(4)]
    made.match(prompts[0])
    before = made.held_pages()
    assert made.give(1) == made.page_bytes
    assert len(before - made.held_pages()) == 1
    assert [len(made.match(tokens)) > 0 for tokens in prompts] == [True, False, True, True]
    assert made.give(2 * made.page_bytes) == 2 * made.page_bytes
    assert [len(made.match(tokens)) > 0 for tokens in prompts] == [False, False, False, True], (
        "that look was a use"
    )
    assert made.give(ALL) == made.page_bytes
    assert made.give(ALL) == 0, "what is left shares the null block's page"
    assert made.tree.total_size() == (BLOCKS_PER_PAGE - 1) * made.page_size


def test_what_a_request_uses_stays_and_so_does_what_shares_its_pages(cache) -> None:
    made = cache()
    made.insert(0, BLOCKS_PER_PAGE - 1)
    half = BLOCKS_PER_PAGE // 2
    used, beside = made.insert(1, half), made.insert(2, half)
    assert made.pages(used) == made.pages(beside), "one page"
    free = made.insert(3, BLOCKS_PER_PAGE)
    node = made.node(used)
    made.tree.inc_lock_ref(node)
    assert made.give(ALL) == made.page_bytes
    assert (len(made.match(used)), len(made.match(beside)), len(made.match(free))) == (
        half * made.page_size,
        half * made.page_size,
        0,
    )
    made.tree.dec_lock_ref(node)
    assert made.give(ALL) == made.page_bytes
    assert len(made.match(used)) == len(made.match(beside)) == 0


def test_a_prefix_goes_with_what_follows_it_and_may_stay_without(cache) -> None:
    made = cache()
    made.insert(0, BLOCKS_PER_PAGE - 1)
    stem = made.insert(1, BLOCKS_PER_PAGE)
    branches = [made.insert(2 + n, BLOCKS_PER_PAGE, after=stem) for n in range(2)]
    assert made.give(1) == made.page_bytes
    assert [len(made.match(tokens)) for tokens in branches] == [len(stem), len(branches[1])]
    made.tree.inc_lock_ref(made.node(branches[1]))
    assert made.give(ALL) == 0
    made.tree.dec_lock_ref(made.node(branches[1]))
    assert made.give(2 * made.page_bytes) == 2 * made.page_bytes
    assert len(made.match(stem)) == 0


def test_the_cap_is_kept_by_the_scheduler_itself(cache) -> None:
    cap = 25
    made = cache(most_cached=cap)
    prompts = [made.insert(1 + n, 5) for n in range(7)]
    assert made.tree.evictable_size() > cap
    made.prefixes.serve()
    made.check()
    assert cap - 5 * made.page_size < made.tree.evictable_size() <= cap
    if made.page_size == 1:
        assert [len(made.match(tokens)) for tokens in prompts] == [0, 0, 5, 5, 5, 5, 5], "the oldest go"
    before = made.tree.evictable_size()
    made.prefixes.serve()
    assert made.tree.evictable_size() == before


def test_who_asks_while_the_scheduler_does_not_come_is_told_so(cache, monkeypatch) -> None:
    made = cache()
    tokens = made.insert(1, 3 * BLOCKS_PER_PAGE)
    monkeypatch.setattr(eviction, "ANSWER_S", 0.05)
    assert made.prefixes.evict(ALL) == 0
    made.prefixes.serve()
    assert len(made.match(tokens)) == len(tokens), "nobody waits for it any longer"


@pytest.mark.parametrize("seed", range(30))
def test_any_history_keeps_the_tree_and_the_ledger_in_step(cache, seed) -> None:
    """A slow reference: what could be given is what is given, by whole pages."""
    made, source = cache(), random.Random(seed)
    known: list[list[int]] = []
    locked: list[Any] = []
    for step in range(40):
        action = source.choice(["insert", "insert", "extend", "lock", "unlock", "touch", "give", "evict"])
        room = made.allocator.logical_size() // made.page_size
        size = source.randrange(1, 7)
        if action in ("insert", "extend") and room < size:
            action = "give"
        if action == "insert":
            known.append(made.insert(step + 1, size))
        elif action == "extend" and known:
            tokens = source.choice(known)
            whole = made.match(tokens)
            if len(whole):
                known.append(made.insert(step + 1, size, after=tokens[: len(whole)]))
        elif action == "lock" and known:
            node = made.node(source.choice(known))
            if node is not made.tree.root_node:
                made.tree.inc_lock_ref(node)
                locked.append(node)
        elif action == "unlock" and locked:
            made.tree.dec_lock_ref(locked.pop(source.randrange(len(locked))))
        elif action == "touch" and known:
            made.match(source.choice(known))
        elif action == "evict":
            made.tree.evict(EvictParams(num_tokens=size * made.page_size))
            made.allocator.collect(wait=True)
        else:
            wanted = source.randrange(1, 4)
            can, before = pages_that_would_empty(made), made.held_pages()
            given = made.give(wanted * made.page_bytes) // made.page_bytes
            gone = before - made.held_pages()
            # More than was wanted where one node holds several pages.
            assert min(wanted, len(can)) <= given <= len(gone) and gone <= can
        made.check()
    for node in locked:
        made.tree.dec_lock_ref(node)
    made.give(ALL)
    assert pages_that_would_empty(made) == set()


def pages_that_would_empty(made: Cache) -> set[int]:
    """Pages all of whose held blocks are in nodes that nobody has locked, nor anything below them."""
    free: list[int] = []

    def walk(node: Any) -> None:
        for child in node.children.values():
            if child.lock_ref == 0:
                free.extend({int(i) // made.page_size for i in child.value})
            walk(child)

    walk(made.tree.root_node)
    counts: dict[int, int] = {}
    for page in made.allocator.pool.pages_of(free) if free else []:
        counts[page] = counts.get(page, 0) + 1
    pages = list(counts)
    held = made.allocator.pool.get_page_occupancy(pages) if pages else []
    return {page for page, (count, _) in zip(pages, held, strict=True) if counts[page] == count}


@pytest.mark.parametrize("plain", [True, False])
def test_only_sglang_s_plain_tree_is_adopted(elastic, plain) -> None:
    class Other(RadixCache):  # type: ignore[misc]
        pass

    allocator = elastic(1)
    allocator.memory.launch.settings.max_cached_tokens = None
    tree = RadixCache.create_simulated(mock_allocator=allocator)
    if not plain:
        tree.__class__ = Other
    eviction.adopt(SimpleNamespace(token_to_kv_pool_allocator=allocator, tree_cache=tree))
    assert (allocator.prefixes is not None) == plain
    allocator.memory.close()

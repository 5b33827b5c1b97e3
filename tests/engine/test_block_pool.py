"""The overlay of vLLM's own block pool over a real pool of the core, without an engine.

What must hold after every call: a block is held in the ledger exactly while a request holds it or its content is
cached, and vLLM's queue holds the cached blocks that nobody holds.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

from kvcached import _core
from kvcached.errors import BlockError, KVCachePoolExhausted, StateConsistencyError
from kvcached.integration.vllm import block_pool
from tests.ranges import settled_pages

NUM_BLOCKS = 61
GEOMETRY = _core.Geometry.solve(3, 8192, 4096, page_bytes=3 * 8192 * 4, tokens_per_block=16)


class BoundedPool(_core.Pool):
    """Memory for `budget_pages` pages."""

    budget_pages = 1000

    def reserve_demand(self, n: int) -> int:
        left = max(0, self.budget_pages - len(settled_pages(self)))
        return super().reserve_demand(min(n, self.backed_size() + left * self.geometry.blocks_per_page))


@pytest.fixture
def pools():
    """vLLM's pool with the overlay, and the core's pool under it."""
    made = []

    def make(
        caching: bool = True, native: BlockPool | None = None, **options
    ) -> tuple[BlockPool, BoundedPool]:
        pool = BoundedPool(
            _core.FTensor("cpu", GEOMETRY, NUM_BLOCKS),
            reserve_null_block=True,
            async_sched=True,
            max_reserved_bytes=0,
            **options,
        )
        native = native or BlockPool(NUM_BLOCKS, caching, hash_block_size=16)
        block_pool.overlay_block_pool(native, pool)
        made.append(pool)
        return native, pool

    yield make
    for pool in made:
        pool.shutdown()


def content(number: int):
    return make_block_hash_with_group_id(BlockHash(number.to_bytes(32, "big")), 0)


def cache(native: BlockPool, block, number: int) -> None:
    native._insert_block_hash(content(number), block, num_tokens=16)


def check(native: BlockPool, pool: _core.Pool) -> None:
    blocks = list(native.blocks)
    held = [b for b in blocks if b.ref_cnt > 0 or b.block_hash is not None or b.is_null]
    cached = [b for b in blocks if b.ref_cnt == 0 and b.block_hash is not None]
    assert pool.stats()["held_blocks"] == len(held)
    by_page = pool.get_page_occupancy(range(pool.ftensor.num_pages))
    for page, (occupied, _) in enumerate(by_page):
        assert occupied == sum(pool.pages_of([b.block_id]) == [page] for b in held)
    mapped = set(pool.ftensor.mapped_pages())
    assert set(pool.pages_of([b.block_id for b in held])) <= mapped
    queue = native.free_block_queue
    assert {b.block_id for b in queue.cached_blocks()} == {b.block_id for b in cached}
    assert queue.num_free_blocks == len(cached)
    assert native.get_num_free_blocks() == len(blocks) - len(held) + len(cached)
    assert len(queue.get_all_free_blocks()) == native.get_num_free_blocks()


def test_ids_are_those_of_the_geometry(pools):
    native, pool = pools()
    assert [b.block_id for b in native.blocks] == [GEOMETRY.block_id(i) for i in range(NUM_BLOCKS)]
    assert native.null_block.block_id == 0
    assert len(native.blocks) == pool.id_space > NUM_BLOCKS
    assert all(native.blocks[b.block_id] is b for b in native.blocks)
    with pytest.raises(BlockError):
        native.blocks[GEOMETRY.blocks_per_page]  # an id that no block has
    check(native, pool)


def test_allocate_and_free(pools):
    native, pool = pools(caching=False)
    blocks = native.get_new_blocks(10)
    assert [b.ref_cnt for b in blocks] == [1] * 10
    assert len(set(pool.pages_of([b.block_id for b in blocks]))) == 3, (
        "three pages of four, the null block in one"
    )
    check(native, pool)
    native.free_blocks(reversed(blocks))
    assert settled_pages(pool) == [0]
    check(native, pool)
    with pytest.raises(BlockError):
        native.free_block_queue.append_n([blocks[0]])


def test_all_blocks_can_be_had_and_no_more(pools):
    native, pool = pools(caching=False)
    blocks = native.get_new_blocks(NUM_BLOCKS - 1)
    assert native.get_num_free_blocks() == 0
    assert native.get_usage() == 1
    with pytest.raises(ValueError, match="Cannot get 1"):
        native.get_new_blocks(1)
    with pytest.raises(KVCachePoolExhausted):
        native.free_block_queue.popleft_n(1)
    check(native, pool)
    native.free_blocks(blocks)
    check(native, pool)


def test_cached_blocks_keep_their_memory_and_are_evicted_oldest_first(pools):
    native, pool = pools()
    blocks = native.get_new_blocks(NUM_BLOCKS - 1)
    for number, block in enumerate(blocks[:20]):
        cache(native, block, number)
    native.free_blocks(reversed(blocks))
    check(native, pool)
    assert native.get_cached_block(BlockHash((3).to_bytes(32, "big")), [0]) == [blocks[3]]
    taken = native.get_new_blocks(NUM_BLOCKS - 1 - 20 + 2)  # all that have no content, and two that have
    evicted = {b.block_id for b in taken} & {b.block_id for b in blocks[:20]}
    assert evicted == {blocks[19].block_id, blocks[18].block_id}, (
        "freed last to first: the oldest are the last"
    )
    check(native, pool)


def test_touch_takes_a_cached_block_back(pools):
    native, pool = pools()
    blocks = native.get_new_blocks(4)
    cache(native, blocks[1], 7)
    native.free_blocks(blocks)
    native.touch([blocks[1]])
    assert blocks[1].ref_cnt == 1
    check(native, pool)
    native.free_blocks([blocks[1]])
    check(native, pool)


def test_touch_of_a_block_without_content_claims_it(pools):
    native, pool = pools()
    block = native.blocks[GEOMETRY.block_id(30)]
    native.touch([block])
    assert pool.pages_of([block.block_id])[0] in pool.ftensor.mapped_pages()
    check(native, pool)
    native.free_blocks([block])
    check(native, pool)


def test_a_hash_on_a_free_block_makes_it_cached(pools):
    native, pool = pools()
    block = native.blocks[GEOMETRY.block_id(30)]
    cache(native, block, 1)
    check(native, pool)
    native.evict_blocks({block.block_id})
    assert block.block_hash is None
    check(native, pool)


def test_evict_blocks(pools):
    native, pool = pools()
    blocks = native.get_new_blocks(6)
    for number, block in enumerate(blocks):
        cache(native, block, number)
    native.free_blocks(blocks[:3])
    native.evict_blocks({b.block_id for b in blocks})  # three in the queue, three held by a request
    check(native, pool)
    assert pool.stats()["held_blocks"] == 1 + 3
    native.free_blocks(blocks[3:])
    check(native, pool)


def test_reset_prefix_cache(pools):
    native, pool = pools()
    blocks = native.get_new_blocks(30)
    for number, block in enumerate(blocks):
        cache(native, block, number)
    assert not native.reset_prefix_cache(), "blocks are held"
    native.free_blocks(blocks)
    check(native, pool)
    assert len(settled_pages(pool)) == 8
    assert native.reset_prefix_cache()
    assert settled_pages(pool) == [0]
    assert native.get_cached_block(BlockHash((3).to_bytes(32, "big")), [0]) is None
    check(native, pool)


PAGE = GEOMETRY.page_bytes


def pages_that_would_empty(native: BlockPool, pool: _core.Pool) -> list[int]:
    """By looking at every block: the least recently used page first."""
    place = {block.block_id: n for n, block in enumerate(native.free_block_queue.cached_blocks())}
    age: dict[int, float] = {}
    for block in native.blocks:
        (page,) = pool.pages_of([block.block_id])
        if block.ref_cnt > 0 or block.is_null:
            age[page] = float("inf")
        elif block.block_hash is not None:
            age[page] = max(age.get(page, 0), place[block.block_id])
    return sorted((page for page in age if age[page] < float("inf")), key=age.__getitem__)


def content_of(native: BlockPool) -> dict[int, object]:
    return {b.block_id: b.block_hash for b in native.blocks if b.block_hash is not None}


def evict_checked(native: BlockPool, pool: _core.Pool, nbytes: int) -> int:
    """Evicts; exactly what must go goes."""
    whole, before = pages_that_would_empty(native, pool), content_of(native)
    given = native.evict(nbytes)
    gone = whole[: -(-nbytes // PAGE)]
    assert given == len(gone) * PAGE
    after = {i: content for i, content in before.items() if pool.pages_of([i])[0] not in gone}
    assert content_of(native) == after
    for block_id, block_hash in before.items():
        found = native.cached_block_hash_to_block.contain(block_hash, block_id)
        assert found == (block_id in after)
    check(native, pool)
    return given


def cached_blocks(native: BlockPool, count: int) -> list:
    """Allocated and with content, in order of their ids: three in the null block's page, four in each of the next."""
    blocks = sorted(native.get_new_blocks(count), key=lambda block: block.block_id)
    for number, block in enumerate(blocks):
        cache(native, block, number)
    return blocks


class TestEvict:
    def test_whole_pages_the_least_recently_used_first(self, pools):
        native, pool = pools()
        blocks = cached_blocks(native, 23)
        native.free_blocks(blocks[3:7] + blocks[11:15] + blocks[7:11] + blocks[15:])
        native.touch([blocks[3]])  # page 1 is used again: it is the youngest now
        native.free_blocks([blocks[3]])
        assert pages_that_would_empty(native, pool) == [3, 2, 4, 5, 1]
        assert evict_checked(native, pool, 1) == PAGE
        assert settled_pages(pool) == [0, 1, 2, 4, 5]
        assert evict_checked(native, pool, PAGE + 1) == 2 * PAGE
        assert settled_pages(pool) == [0, 1, 5]
        assert evict_checked(native, pool, 1 << 60) == 2 * PAGE, "all that can be had"
        assert settled_pages(pool) == [0]
        assert evict_checked(native, pool, 1 << 60) == 0
        native.free_blocks(blocks[:3])
        assert evict_checked(native, pool, 1 << 60) == 0, "the null block stays where it is"

    def test_a_page_with_a_block_in_use_is_left_alone(self, pools):
        native, pool = pools()
        blocks = cached_blocks(native, 23)
        native.free_blocks(blocks[:4] + blocks[5:])  # one is held, with content
        assert evict_checked(native, pool, 1 << 60) == 4 * PAGE
        assert settled_pages(pool) == [0, 1]
        assert all(block.block_hash is not None for block in blocks[:7])

    def test_a_page_with_a_block_in_use_without_content_is_left_alone(self, pools):
        native, pool = pools()
        blocks = native.get_new_blocks(23)
        blocks.sort(key=lambda block: block.block_id)
        for number, block in enumerate(blocks):
            if block is not blocks[4]:
                cache(native, block, number)
        native.free_blocks(blocks[:4] + blocks[5:])
        assert evict_checked(native, pool, 1 << 60) == 4 * PAGE
        assert settled_pages(pool) == [0, 1]

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_nothing_wanted_nothing_gone(self, pools, nbytes):
        native, _ = pools()
        native.free_blocks(cached_blocks(native, 23))
        assert native.evict(nbytes) == 0
        assert len(content_of(native)) == 23

    def test_nothing_is_cached(self, pools):
        native, pool = pools()
        assert evict_checked(native, pool, 1 << 60) == 0
        assert native.cached_bytes == 0

    def test_events_and_metrics_are_vllm_s(self, pools):
        evicted = []
        metrics = SimpleNamespace(
            on_block_allocated=lambda block: None,
            on_block_evicted=lambda block: evicted.append(block.block_id),
        )
        native, _ = pools(
            native=BlockPool(
                NUM_BLOCKS, True, hash_block_size=16, enable_kv_cache_events=True, metrics_collector=metrics
            )
        )
        native.free_blocks(reversed(cached_blocks(native, 23)))
        native.take_events()
        evicted.clear()
        before = content_of(native)
        native.evict(2 * PAGE)
        gone = before.keys() - content_of(native).keys()
        assert len(gone) == 8 and set(evicted) == gone and len(evicted) == 8
        removed = [event.block_hashes for event in native.take_events()]
        expected = [maybe_convert_block_hash(get_block_hash(before[block_id])) for block_id in evicted]
        assert removed == [[block_hash] for block_hash in expected]

    def test_two_blocks_of_one_content(self, pools):
        native, pool = pools()
        blocks = native.get_new_blocks(11)
        for number, block in enumerate(blocks):
            cache(native, block, number % 4)
        native.free_blocks(blocks)
        evict_checked(native, pool, PAGE)
        assert native.get_cached_block(BlockHash((1).to_bytes(32, "big")), [0]) is not None

    def test_one_call_of_the_core(self, pools, monkeypatch):
        native, _ = pools()
        native.free_blocks(cached_blocks(native, 40))
        calls, free = [], BoundedPool.free
        monkeypatch.setattr(
            BoundedPool, "free", lambda self, ids: (calls.append(len(ids)), free(self, ids))[1]
        )
        native.evict(5 * PAGE)
        assert calls == [20]

    def test_cached_bytes_are_those_that_no_request_uses(self, pools):
        native, _ = pools()
        blocks = cached_blocks(native, 23)
        assert native.cached_bytes == 0
        native.free_blocks(blocks[:9])
        assert native.cached_bytes == 9 * PAGE // 4

    def test_the_cap_takes_whole_pages_first(self, pools):
        native, pool = pools()
        blocks = cached_blocks(native, 23)
        native.free_blocks(
            blocks[:20]
        )  # 3 in the null block's page, 16 in pages 1 to 4, one in page 5, where others are in use
        native.keep_to_cap()
        assert len(content_of(native)) == 23, "no cap"
        native.most_cached = 18
        native.keep_to_cap()
        check(native, pool)
        assert settled_pages(pool) == [0, 2, 3, 4, 5], "a page, although two blocks would do"
        native.keep_to_cap()
        assert native.free_block_queue.num_free_blocks == 16
        native.most_cached = 2
        native.keep_to_cap()
        check(native, pool)
        assert settled_pages(pool) == [0, 5]
        assert [b.block_id for b in native.free_block_queue.cached_blocks()] == [
            blocks[i].block_id for i in (2, 19)
        ], "the oldest went where no page empties"
        native.most_cached = 0
        native.keep_to_cap()
        check(native, pool)
        assert native.cached_bytes == 0
        assert len(content_of(native)) == 3, "those in use keep theirs"


def test_one_call_of_the_core_a_call_of_vllm(pools, monkeypatch):
    native, pool = pools(caching=False)
    calls = []
    for name in ("alloc", "free"):
        method = getattr(BoundedPool, name)
        monkeypatch.setattr(
            BoundedPool, name, lambda self, ids, m=method, n=name: (calls.append(n), m(self, ids))[1]
        )
    blocks = native.get_new_blocks(40)
    native.free_blocks(reversed(blocks))
    assert calls == ["alloc", "free"]
    check(native, pool)


def demand(native: BlockPool, needed: int, hits: int = 0) -> int:
    """What a check sees: `get_num_blocks_to_allocate`, then `get_num_free_blocks`."""
    native.demand = (needed, hits)
    return native.get_num_free_blocks()


class TestShortOfMemory:
    def test_a_check_sees_what_can_be_had(self, pools):
        native, pool = pools()
        pool.budget_pages = 3
        assert demand(native, 20) == 11, "three pages of four, less the null block"
        assert native.get_num_free_blocks() == 60, "asked about anything else, the pool counts blocks"
        native.ledger.refused = False
        assert demand(native, 11) == 60
        assert len(native.get_new_blocks(11)) == 11
        check(native, pool)

    def test_refused_once_a_step(self, pools, monkeypatch):
        native, pool = pools()
        pool.budget_pages = 1
        asked = []
        reserve = BoundedPool.reserve_demand
        monkeypatch.setattr(
            BoundedPool, "reserve_demand", lambda self, n: (asked.append(n), reserve(self, n))[1]
        )
        assert [demand(native, 10) for _ in range(5)] == [3] * 5
        assert asked == [10]
        native.ledger.refused = False  # the next step
        assert demand(native, 10) == 3
        assert asked == [10, 10]

    def test_cached_blocks_are_what_can_be_had(self, pools):
        native, pool = pools()
        pool.budget_pages = 3
        blocks = native.get_new_blocks(11)
        for number, block in enumerate(blocks):
            cache(native, block, number)
        native.free_blocks(reversed(blocks))
        assert demand(native, 12) == 11
        assert demand(native, 5) == 11
        taken = native.get_new_blocks(5)
        assert {b.block_id for b in taken} == {b.block_id for b in blocks[-5:]}
        assert len(settled_pages(pool)) == 3
        check(native, pool)

    def test_hits_need_no_memory(self, pools):
        native, pool = pools()
        pool.budget_pages = 3
        blocks = native.get_new_blocks(11)
        for number, block in enumerate(blocks):
            cache(native, block, number)
        native.free_blocks(blocks)
        # Eight hits and two new blocks: eleven can be had, and two of the other three go.
        assert demand(native, 10, hits=8) == 11
        native.touch(blocks[:8])
        check(native, pool)
        taken = native.get_new_blocks(2)
        assert {b.block_id for b in taken} == {b.block_id for b in blocks[8:10]}
        check(native, pool)

    def test_what_a_check_was_told_stays_although_idle_memory_leaves(self, pools):
        """What has just retired leaves in the background, and nobody can have it back."""
        native, pool = pools()
        for _ in range(50):
            pool.budget_pages, native.ledger.refused = 1000, False
            epoch = pool.begin_epoch()
            native.free_blocks(native.get_new_blocks(40))
            pool.release_through(epoch)
            native.ledger.refused = True
            told = native.ledger.on_hand(40)
            pool.budget_pages = 0
            assert pool.quiesce() and pool.backed_size() >= told
            native.free_blocks(native.get_new_blocks(told))

    def test_unchecked_callers_get_a_typed_error(self, pools):
        native, pool = pools()
        pool.budget_pages = 1
        with pytest.raises(KVCachePoolExhausted, match="4 blocks wanted, 3 can be had"):
            native.free_block_queue.popleft_n(4)
        check(native, pool)


def test_a_pool_in_use_is_not_overlaid(pools):
    _, pool = pools()
    native = BlockPool(NUM_BLOCKS, True, hash_block_size=16)
    native.get_new_blocks(1)
    with pytest.raises(StateConsistencyError, match="expected all"):
        block_pool.overlay_block_pool(native, pool)
    with pytest.raises(StateConsistencyError, match="expected all"):
        block_pool.overlay_block_pool(BlockPool(NUM_BLOCKS + 1, True, hash_block_size=16), pool)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls(pools, seed):
    """Random calls as vLLM makes them; memory runs short in between, and every check is believed."""
    draw = random.Random(seed)
    native, pool = pools(highest_pages_first=seed % 2 == 1)
    requests: list[list] = []
    numbers = iter(range(1000000))
    for _ in range(300):
        pool.budget_pages = draw.choice([2, 5, 9, 1000])
        native.ledger.refused = False
        epoch = pool.begin_epoch()
        for _ in range(draw.randrange(4)):
            action = draw.random()
            if action < 0.5:
                count = draw.randrange(1, 15)
                if count <= demand(native, count):
                    requests.append(native.get_new_blocks(count))
            elif action < 0.75 and requests:
                blocks = requests.pop(draw.randrange(len(requests)))
                native.free_blocks(reversed(blocks))
            elif action < 0.9 and requests:
                for block in draw.choice(requests):
                    if block.block_hash is None and draw.random() < 0.7:
                        cache(native, block, next(numbers))
            elif action < 0.95:
                cached = native.free_block_queue.cached_blocks()
                if cached:
                    hit = draw.sample(cached, draw.randrange(1, len(cached) + 1))
                    if len(hit) <= demand(native, len(hit), hits=len(hit)):
                        native.touch(hit)
                        requests.append(hit)
            elif action < 0.98:
                evict_checked(native, pool, draw.randrange(4 * PAGE))
            else:
                cached = native.free_block_queue.cached_blocks()
                native.evict_blocks({b.block_id for b in cached[: len(cached) // 2]})
            check(native, pool)
        pool.release_through(epoch)
        check(native, pool)
    for blocks in requests:
        native.free_blocks(blocks)
    assert native.reset_prefix_cache()
    assert settled_pages(pool) == [0]
    check(native, pool)

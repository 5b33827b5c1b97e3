"""`KVCacheManager` against a reference of sets, on the host backend."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcached
from kvcached import _core, vmm_ops
from kvcached.errors import BlockError, KVCachedConfigError, MapQuarantinedError, QuarantinedResizeError

NUM_BLOCKS = 300


def make(**kwargs) -> kvcached.KVCacheManager:
    vmm_ops.shutdown_kvcached()
    vmm_ops.init_kvcached("cpu")
    arguments = {"num_blocks": NUM_BLOCKS, "block_size": 16, "cell_size": 4096, "num_layers": 4} | kwargs
    return kvcached.KVCacheManager(**arguments)


@pytest.fixture(autouse=True)
def clean():
    yield
    vmm_ops.shutdown_kvcached()
    gc.collect()
    assert _core.live_ranges() == 0


@pytest.fixture
def no_reserve(monkeypatch):
    monkeypatch.setenv("KVCACHED_MAX_RESERVED_MB", "0")


def test_names_and_numbers(no_reserve):
    manager = make()
    assert manager.available_size() == NUM_BLOCKS
    assert manager.get_mapped_memory_size("B") == 0
    ids = manager.alloc(5)
    assert ids == sorted(set(ids)) and len(ids) == 5
    assert all(0 <= i < manager.id_space for i in ids)
    assert manager.available_size() == NUM_BLOCKS - 5
    assert manager.get_mapped_memory_size("MB") == manager.geometry.page_bytes / 2**20
    assert manager.get_page_occupancy(manager.pages_of(ids[:1])) == [(5, manager.geometry.blocks_per_page)]
    assert (manager.emptied_by(ids), manager.emptied_by(ids[1:])) == (1, 0)
    manager.free(ids)
    with pytest.raises(BlockError, match=f"block {ids[0]} "):
        manager.emptied_by(ids)
    assert manager.available_size() == NUM_BLOCKS
    assert manager.quiesce() and manager.get_mapped_memory_size() == 0
    snapshot = manager.observability_snapshot()
    assert snapshot["device"] == "cpu" and snapshot["mapped_bytes"] == 0
    with pytest.raises(KVCachedConfigError, match="unit"):
        manager.get_mapped_memory_size("parsecs")


def test_every_block_is_a_row_of_its_own(no_reserve):
    manager = make()
    views = [np.from_dlpack(b) for b in manager.ftensor.buffers()]
    size = manager.geometry.block_bytes
    ids = manager.alloc(NUM_BLOCKS)
    assert len(set(ids)) == NUM_BLOCKS
    for number, block in enumerate(ids):
        for buffer, view in enumerate(views):
            view[block * size : (block + 1) * size].view(np.int32)[:] = number * len(views) + buffer
    for number, block in enumerate(ids):
        for buffer, view in enumerate(views):
            assert (
                view[block * size : (block + 1) * size].view(np.int32) == number * len(views) + buffer
            ).all()
    assert manager.alloc(1) is None
    del view, views


def test_all_or_nothing_and_typed_errors(no_reserve):
    manager = make()
    assert manager.alloc(NUM_BLOCKS + 1) is None
    assert manager.available_size() == NUM_BLOCKS
    ids = manager.alloc(3)
    state = manager.stats()
    for bad in ([ids[0], ids[0]], [ids[0], 10**8], [ids[0], manager.id_space - 1], [-1]):
        with pytest.raises(BlockError):
            manager.free(bad)
        assert manager.stats() == state
    manager.free(ids)
    with pytest.raises(BlockError):
        manager.free(ids[:1])


def test_the_null_block_is_zero_and_stays():
    manager = make(reserve_null_block=True)
    assert manager.null_block == 0
    assert manager.available_size() == NUM_BLOCKS - 1
    with pytest.raises(BlockError):
        manager.free([0])
    ids = manager.alloc(NUM_BLOCKS - 1)
    assert 0 not in ids
    manager.free(ids)
    manager.trim()
    assert manager.ftensor.mapped_pages() == [0]
    manager.clear()
    assert manager.null_block == 0 and manager.available_size() == NUM_BLOCKS - 1


def test_reserved_blocks_serve_the_next_allocation(no_reserve):
    manager = make()
    assert manager.try_to_reserve(NUM_BLOCKS)
    assert not manager.try_to_reserve(1)
    assert len(manager.alloc(10)) == 10
    manager.free_reserved()
    assert manager.available_size() == NUM_BLOCKS - 10


def test_demand_is_backed_before_it_is_allocated(no_reserve):
    manager = make()
    assert manager.backed_size() == 0
    assert manager.reserve_demand(20) == 20
    pages = manager.ftensor.mapped_pages()
    assert manager.backed_size() >= 20
    manager.alloc(20)
    assert manager.ftensor.mapped_pages() == pages
    assert manager.reserve_demand(10**6) == NUM_BLOCKS - 20


def test_retired_pages_stay_until_their_step_ends(no_reserve):
    manager = make(async_sched=True)
    ids = manager.alloc(50)
    first = manager.begin_epoch()
    manager.free(ids)
    second = manager.begin_epoch()
    assert manager.ftensor.mapped_bytes > 0
    manager.release_through(first)
    manager.release_through(second)
    assert manager.quiesce() and manager.ftensor.mapped_bytes == 0


def test_the_reserve_is_kept_and_trimmed(monkeypatch):
    monkeypatch.setenv("KVCACHED_MAX_RESERVED_MB", "40")
    manager = make()
    manager.free(manager.alloc(NUM_BLOCKS))
    page = manager.geometry.page_bytes
    assert manager.quiesce()
    assert manager.stats()["reserved_bytes"] == (40 << 20) // page * page
    assert manager.trim() == (40 << 20) // page * page
    assert manager.ftensor.mapped_bytes == 0


def test_a_min_reserve_is_backed_at_once(monkeypatch):
    monkeypatch.setenv("KVCACHED_MIN_RESERVED_MB", "32")
    assert make().stats()["reserved_bytes"] >= 32 << 20


def test_highest_pages_first(monkeypatch, no_reserve):
    monkeypatch.setenv("KVCACHED_PAGE_ORDER", "highest")
    manager = make(reserve_null_block=True)
    more_than_page_0_has = manager.alloc(manager.geometry.blocks_per_page)
    assert set(manager.pages_of(more_than_page_0_has)) == {0, manager.ftensor.num_pages - 1}


def test_tensors_made_without_a_block_size_take_any_power_of_two(no_reserve):
    vmm_ops.shutdown_kvcached()
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(32 << 20, 2, num_layers=4)
    manager = kvcached.KVCacheManager(100, 16, 2048, 4)
    ids = manager.alloc(100)
    views = [np.from_dlpack(b) for b in manager.ftensor.buffers()]
    for view in views:
        for block in ids:
            view[block * 32768 : (block + 1) * 32768] = 1
    del view, views
    with pytest.raises(KVCachedConfigError, match="block_bytes"):
        kvcached.KVCacheManager(100, 16, 3000, 4)
    with pytest.raises(KVCachedConfigError, match="buffers"):
        kvcached.KVCacheManager(100, 16, 2048, 5)


@pytest.mark.parametrize(
    ("change", "match"),
    [({"num_blocks": 0}, "num_blocks"), ({"world_size": 2}, "ranks"), ({"cell_size": -1}, "cell_size")],
)
def test_bad_numbers(change, match):
    with pytest.raises(KVCachedConfigError, match=match):
        make(**change)


def test_shutdown_twice_and_after():
    manager = make()
    manager.alloc(3)
    manager.shutdown()
    manager.shutdown()
    assert manager.ftensor.mapped_bytes == 0
    with pytest.raises(kvcached.errors.KVCachedError, match="shut"):
        manager.alloc(1)


def test_lost_pages_stand_in_the_way_of_a_smaller_limit(no_reserve):
    """Somebody unmapped a page behind the pool's back: nobody knows any longer what it holds."""
    manager = make()
    page, in_a_page = manager.geometry.page_bytes, manager.geometry.blocks_per_page
    ids = manager.alloc(in_a_page)
    manager.ftensor.unmap(manager.pages_of(ids[:1]))
    manager.free(ids)
    assert manager.quiesce() and manager.stats()["quarantined_pages"] == 1
    standing = manager.memory_limit_state()
    assert (standing.state, standing.occupied_bytes) == ("applied", page)
    with pytest.raises(QuarantinedResizeError, match=rf"bytes_per_layer=0: {page} bytes are lost"):
        manager.resize(0)
    refused = manager.set_memory_limit(page - 1)
    assert refused.state == "rejected" and "are lost" in refused.reason
    assert manager.memory_limit_state() == standing, "nothing was changed"
    assert manager.resize(in_a_page * 16 * 4096 * 2)
    assert manager.memory_limit_state()[:3] == ("applied", 1, page)
    assert manager.available_size() == 0, "a lost page counts, and has no blocks to give"
    with pytest.raises(MapQuarantinedError):
        manager.resize(0)


class Reference(RuleBasedStateMachine):
    """The manager does what a set of held ids does, and what is mapped covers what is held."""

    @initialize(asynchronous=st.booleans(), null=st.booleans(), reserve_mb=st.sampled_from([0, 20, 64]))
    def start(self, asynchronous, null, reserve_mb):
        import os

        os.environ["KVCACHED_MAX_RESERVED_MB"] = str(reserve_mb)
        self.reserve_bytes = reserve_mb << 20
        self.asynchronous = asynchronous
        self.manager = make(async_sched=asynchronous, reserve_null_block=null)
        self.held: set[int] = {0} if null else set()
        self.null = null
        self.steps: list[int] = []

    @rule(n=st.integers(1, 120))
    def alloc(self, n):
        ids = self.manager.alloc(n)
        if n > NUM_BLOCKS - len(self.held):
            assert ids is None
        else:
            assert ids is not None and len(ids) == n and not self.held & set(ids)
            self.held |= set(ids)

    @rule(places=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1))
    def free(self, places):
        """Which ids there are to free depends on what the pager has done, so that places among them are drawn."""
        choices = sorted(self.held - ({0} if self.null else set()))
        ids = {choices[place % len(choices)] for place in places if choices}
        self.manager.free(sorted(ids))
        self.held -= ids

    @rule(data=st.data(), n=st.integers(1, 8))
    def claim(self, data, n):
        every = [self.manager.geometry.block_id(i) for i in range(NUM_BLOCKS)]
        ids = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1, max_size=n))
        if self.held & set(ids):
            with pytest.raises(BlockError):
                self.manager.claim(ids)
        else:
            self.manager.claim(ids)
            self.held |= set(ids)

    @rule()
    def begin(self):
        self.steps.append(self.manager.begin_epoch())

    @precondition(lambda self: self.steps)
    @rule()
    def end(self):
        self.manager.release_through(self.steps.pop(0))

    @rule()
    def trim(self):
        self.manager.trim()

    @rule(n=st.integers(1, 400))
    def demand(self, n):
        assert self.manager.reserve_demand(n) == min(n, NUM_BLOCKS - len(self.held))

    @invariant()
    def agrees(self):
        if not hasattr(self, "manager"):
            return
        assert self.manager.available_size() == NUM_BLOCKS - len(self.held)
        mapped = set(self.manager.ftensor.mapped_pages())
        assert set(self.manager.pages_of(sorted(self.held))) <= mapped

    def teardown(self):
        import os

        os.environ.pop("KVCACHED_MAX_RESERVED_MB", None)
        if hasattr(self, "manager"):
            self.manager.shutdown()
            del self.manager


Reference.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestReference = Reference.TestCase


def test_a_lost_page_is_told_on_stderr():
    """A page that somebody unmapped behind the pool's back: the free goes through, the page is never used again."""
    code = (
        "from kvcached import _core\n"
        "geometry = _core.Geometry.solve(2, 1 << 20, _core.granularity('cpu'))\n"
        "ftensor = _core.FTensor('cpu', geometry, 64)\n"
        "pool = _core.Pool(ftensor, max_reserved_bytes=0)\n"
        "ids = pool.alloc(3)\n"
        "ftensor.unmap(pool.pages_of(ids[:1]))\n"
        "pool.free(ids)\n"
        "assert pool.quiesce() and pool.stats()['quarantined_pages'] == 1\n"
        "assert pool.available_size() == 64 - geometry.blocks_per_page\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert "could not be unmapped" in done.stderr and "quarantined=[0]" in done.stderr

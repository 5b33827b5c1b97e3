"""Defects that elastic KV caches are known for, each through the public API on real memory of the host."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvcached
from kvcached import _core, vmm_ops
from kvcached.errors import BlockError, KVCachedConfigError
from tests.children import run_script
from tests.ranges import host_range

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BLOCKS = 300
NUM_LAYERS = 4


def make(**kwargs) -> kvcached.KVCacheManager:
    vmm_ops.shutdown_kvcached()
    vmm_ops.init_kvcached("cpu")
    arguments = {"num_blocks": NUM_BLOCKS, "block_size": 16, "cell_size": 4096, "num_layers": NUM_LAYERS}
    return kvcached.KVCacheManager(**arguments | kwargs)


@pytest.fixture(autouse=True)
def clean():
    yield
    vmm_ops.shutdown_kvcached()
    gc.collect()
    assert _core.live_ranges() == 0
    assert pagers(0)


def pagers(expected: int) -> bool:
    """Whether this process has so many threads of pools: one that begins names itself, one that was joined takes a moment to go."""
    for _ in range(100):
        names = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                names.append((task / "comm").read_text().strip())
        if names.count("kvcached-pager") == expected:
            return True
        time.sleep(0.01)
    return False


def memfd_bytes() -> int:
    """Memory that the kernel holds behind this process's memfds."""
    blocks = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):
                blocks += os.stat(f"/proc/self/fd/{fd}").st_blocks
    return blocks * 512


class ShrunkAndGrown(RuleBasedStateMachine):
    """Page ids handed out twice after a shrink and a growth: two requests then write to one block."""

    @initialize(null=st.booleans(), asynchronous=st.booleans(), reserve_mb=st.sampled_from(["0", "64"]))
    def start(self, null, asynchronous, reserve_mb):
        os.environ["KVCACHED_MAX_RESERVED_MB"] = reserve_mb
        self.manager = make(reserve_null_block=null, async_sched=asynchronous)
        self.held: set[int] = {0} if null else set()
        self.null = null
        self.revision = 0

    @rule(n=st.integers(1, 80))
    def alloc(self, n):
        can = n <= self.manager.available_size()
        ids = self.manager.alloc(n)
        assert (ids is not None) is can
        if ids is not None:
            assert len(set(ids)) == n and not self.held & set(ids)
            self.held |= set(ids)

    @rule(places=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1))
    def free(self, places):
        """Which ids there are to free depends on what the pager has done, so that places among them are drawn."""
        choices = sorted(self.held - ({0} if self.null else set()))
        ids = {choices[place % len(choices)] for place in places if choices}
        self.manager.free(sorted(ids))
        self.held -= ids

    @rule(pages=st.integers(0, 60))
    def limit(self, pages):
        limit = self.manager.set_memory_limit(pages * self.manager.geometry.page_bytes)
        assert limit.state in ("applied", "deferred")
        self.revision += 1
        assert limit.revision == self.revision

    @rule(blocks=st.integers(0, 2 * NUM_BLOCKS))
    def resize(self, blocks):
        assert self.manager.resize(blocks * 16 * 4096 * 2)
        self.revision += 1

    @rule()
    def a_step(self):
        self.manager.release_through(self.manager.begin_epoch())

    @rule()
    def trim(self):
        self.manager.trim()

    @invariant()
    def agrees(self):
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        assert manager.held_size() == len(self.held)
        assert manager.available_size() <= NUM_BLOCKS - len(self.held)
        mapped = set(manager.ftensor.mapped_pages())
        assert set(manager.pages_of(sorted(self.held))) <= mapped, "no live block is revoked"
        assert manager.quiesce()
        limit = manager.memory_limit_state()
        assert limit.revision == self.revision
        if limit.state == "applied":
            assert limit.occupied_bytes <= max(limit.limit_bytes, self.null * manager.geometry.page_bytes)
        else:
            assert limit.state == "deferred" and limit.occupied_bytes > limit.limit_bytes
        assert limit.occupied_bytes == manager.ftensor.mapped_bytes

    def teardown(self):
        os.environ.pop("KVCACHED_MAX_RESERVED_MB", None)
        if not hasattr(self, "manager"):
            return
        # Grown to all of it, every block can be had once.
        self.manager.set_memory_limit(1 << 62)
        rest = self.manager.alloc(NUM_BLOCKS - len(self.held))
        assert rest is not None and not self.held & set(rest)
        assert len(self.held | set(rest)) == NUM_BLOCKS
        self.manager.shutdown()
        del self.manager


ShrunkAndGrown.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestShrunkAndGrown = ShrunkAndGrown.TestCase


class TestLimits:
    def test_a_limit_above_what_is_reserved_is_that(self):
        manager = make()
        everything = manager.ftensor.num_pages * manager.geometry.page_bytes
        for bytes_asked in (everything, everything + 1, 10 * everything, 1 << 63, 1 << 70):
            limit = manager.set_memory_limit(bytes_asked)
            assert (limit.state, limit.limit_bytes) == ("applied", everything)
            assert limit == manager.memory_limit_state()
        assert manager.available_size() == NUM_BLOCKS
        assert manager.alloc(NUM_BLOCKS + 1) is None
        assert len(set(manager.alloc(NUM_BLOCKS))) == NUM_BLOCKS
        assert manager.resize(1 << 70) and manager.memory_limit_state().limit_bytes == everything

    def test_one_path_for_all_who_set_limits(self):
        manager = make()
        page = manager.geometry.page_bytes
        assert manager.memory_limit_state().revision == 0
        assert manager.set_memory_limit(9 * page, revision=5).state == "applied"
        standing = manager.memory_limit_state()
        assert standing[:3] == ("applied", 5, 9 * page)

        for stale in (
            manager.set_memory_limit(page, revision=4),
            manager.set_memory_limit(9 * page, revision=0),
        ):
            assert stale == standing._replace(state="stale")
        assert manager.set_memory_limit(page, revision=5) == standing._replace(state="conflict")
        assert manager.set_memory_limit(9 * page, revision=5) == standing, "the very same request again"
        assert manager.memory_limit_state() == standing

        block_bytes = 16 * 4096 * 2  # of one layer, K and V
        in_a_page = manager.geometry.blocks_per_page
        assert manager.resize(3 * in_a_page * block_bytes)
        assert manager.memory_limit_state()[:3] == ("applied", 6, 3 * page), "a resize is a newer limit"
        assert manager.set_memory_limit(9 * page, revision=6).state == "conflict"
        assert manager.available_size() == 3 * in_a_page
        assert manager.resize((3 * in_a_page + 1) * block_bytes - 1), "whole pages"
        assert manager.memory_limit_state()[1:3] == (7, 3 * page)
        assert manager.set_memory_limit(2 * page).revision == 8

    def test_live_blocks_stay_and_the_limit_is_met_as_they_are_freed(self, monkeypatch):
        monkeypatch.setenv("KVCACHED_MAX_RESERVED_MB", "0")
        manager = make()
        page = manager.geometry.page_bytes
        ids = manager.alloc(NUM_BLOCKS)
        assert manager.resize(0), "deferred is a success"
        limit = manager.memory_limit_state()
        assert (limit.state, limit.limit_bytes, limit.reason) == ("deferred", 0, None)
        assert limit.occupied_bytes == manager.ftensor.mapped_bytes > page
        assert manager.available_size() == 0
        manager.free(ids[: NUM_BLOCKS // 2])
        assert manager.alloc(1) is None, "nothing is issued beyond the limit"
        manager.free(ids[NUM_BLOCKS // 2 :])
        assert manager.quiesce()
        assert manager.memory_limit_state() == ("applied", 1, 0, 0, None)
        assert manager.set_memory_limit(2 * page).state == "applied"
        assert manager.available_size() == 2 * manager.geometry.blocks_per_page

    @pytest.mark.parametrize("bad", [-1, -(1 << 70), 1.5, "1", None])
    def test_what_is_no_number_of_bytes(self, bad):
        manager = make()
        for call in (manager.set_memory_limit, manager.resize):
            with pytest.raises(KVCachedConfigError, match="use an int from 0 on"):
                call(bad)
        if bad is not None:
            with pytest.raises(KVCachedConfigError, match=r"revision=.*: use an int from 0 on"):
                manager.set_memory_limit(0, revision=bad)
        assert manager.memory_limit_state().revision == 0


def in_threads(*works: Callable[[], None]) -> None:
    """All at once; none may hang or fail."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody was never woken"
    assert failures == []


class TestWaiting:
    """An allocation that waits for pages on their way was never told of those that came back otherwise."""

    def test_woken_by_a_trim(self):
        manager = make()
        until = time.monotonic() + 1.5

        def allocates() -> None:
            while time.monotonic() < until:
                ids = manager.alloc(NUM_BLOCKS)  # waits for all that is being trimmed
                assert ids is not None, "nobody else holds a block"
                manager.free(ids)

        def trims() -> None:
            while time.monotonic() < until:
                manager.trim()
                time.sleep(0.0005)

        in_threads(allocates, trims)

    def test_woken_by_a_resize(self):
        manager = make()
        page = manager.geometry.page_bytes
        half = NUM_BLOCKS // 2
        until = time.monotonic() + 1.5
        grown = threading.Event()

        def allocates() -> None:
            while time.monotonic() < until:
                grown.wait(10)
                ids = manager.alloc(half)
                if ids is not None:
                    manager.free(ids)

        def resizes() -> None:
            while time.monotonic() < until:
                grown.clear()
                manager.set_memory_limit(page)
                manager.set_memory_limit(1 << 62)
                grown.set()
                time.sleep(0.0005)

        in_threads(allocates, allocates, resizes)
        assert manager.quiesce()
        assert len(manager.alloc(NUM_BLOCKS)) == NUM_BLOCKS

    def test_whoever_waits_for_quiet_is_woken_by_a_shutdown(self):
        manager = make()
        manager.free(manager.alloc(NUM_BLOCKS))

        def waits() -> None:
            with suppress(kvcached.errors.KVCachedError):
                while manager.quiesce(30):
                    pass

        in_threads(waits, waits, lambda: (time.sleep(0.1), manager.shutdown())[0])

    def test_the_pool_s_own_thread_does_not_take_what_an_allocation_has_backed(self):
        """It gives idle pages back while the allocation backs what it lacks, over and over."""
        pool = _core.Pool(host_range(num_blocks=3000), max_reserved_bytes=0)
        for _ in range(2000):
            ids = pool.alloc(290)
            assert ids is not None, "nobody else holds a block"
            pool.free(ids)


class TestStart:
    @pytest.mark.parametrize(
        ("pages", "env"),
        [
            pytest.param(0, {}, id="no memory for the null block"),
            pytest.param(1, {"KVCACHED_MIN_RESERVED_MB": "48"}, id="none for the reserve"),
        ],
    )
    def test_a_start_that_failed_leaves_nothing_behind(self, pages, env):
        """Its pool handed out block 0 to a request. The kernel refuses the file of host memory to grow beyond `pages`."""
        code = (
            "import pathlib, resource, time\n"
            "import kvcached\n"
            "from kvcached import _core, vmm_ops\n"
            "from kvcached.errors import KVCachedError\n"
            "from kvcached.instance import hardware, process_record\n"
            "process_record('kvcached', 'cpu', [hardware('cpu')])\n"
            "vmm_ops.init_kvcached('cpu')\n"
            "vmm_ops.create_kv_tensors(300 * 16 * 4096 * 2, 2, num_layers=4, block_bytes=16 * 4096)\n"
            "ftensor = vmm_ops.get_ftensor()\n"
            "def make(): return kvcached.KVCacheManager(300, 16, 4096, 4, reserve_null_block=True)\n"
            f"limit = {pages} * ftensor.geometry.page_bytes\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
            "for attempt in range(2):\n"
            "    try: manager = make()\n"
            "    except KVCachedError as error: print(type(error).__name__)\n"
            "    assert ftensor.mapped_bytes == 0 and ftensor.quarantined_pages() == []\n"
            "    time.sleep(0.1)\n"
            "    names = [(t / 'comm').read_text() for t in pathlib.Path('/proc/self/task').iterdir()]\n"
            "    assert 'kvcached-pager\\n' not in names, names\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
            "manager = make()\n"
            "ids = manager.alloc(299)\n"
            "assert manager.null_block == 0 and 0 not in ids and manager.alloc(1) is None\n"
        )
        done = run_script(code, **env)
        assert (done.returncode, done.stdout) == (0, "DriverError\n" * 2), done.stderr

    def test_a_page_in_use_by_somebody_else(self):
        """Page 0 belongs to a transaction when the pool wants it for the null block."""
        vmm_ops.init_kvcached("cpu")
        vmm_ops.create_kv_tensors(NUM_BLOCKS * 16 * 4096 * 2, 2, num_layers=NUM_LAYERS, block_bytes=16 * 4096)
        ftensor = vmm_ops.get_ftensor()
        ftensor.map([0])
        ftensor.prepare_unmap(1, [0])
        arguments = (NUM_BLOCKS, 16, 4096, NUM_LAYERS)
        with pytest.raises(kvcached.errors.KVCachedError):
            kvcached.KVCacheManager(*arguments, reserve_null_block=True)
        assert pagers(0)
        ftensor.commit_unmap(1)
        manager = kvcached.KVCacheManager(*arguments, reserve_null_block=True)
        assert 0 not in manager.alloc(NUM_BLOCKS - 1)
        manager.shutdown()


class TestDoubleFree:
    """Undetected, the block is handed out twice."""

    @pytest.mark.parametrize("form", [list, tuple, np.array, iter], ids=lambda form: form.__name__)
    def test_in_one_call_and_in_two(self, form):
        manager = make()
        ids = manager.alloc(20)
        with pytest.raises(BlockError, match=f"block {ids[3]} is named twice"):
            manager.free(form([*ids, ids[3]]))
        assert manager.available_size() == NUM_BLOCKS - 20
        manager.free(form(ids[:10]))
        for again in (ids, ids[9:10], ids[10:] + ids[:1]):
            with pytest.raises(BlockError, match="freed twice or never issued"):
                manager.free(form(again))
            assert manager.available_size() == NUM_BLOCKS - 10
        later = manager.alloc(NUM_BLOCKS - 10)
        assert len(set(later) | set(ids[10:])) == NUM_BLOCKS

    def test_of_a_page_that_lost_its_memory(self, monkeypatch):
        monkeypatch.setenv("KVCACHED_MAX_RESERVED_MB", "0")
        manager = make()
        ids = manager.alloc(20)
        manager.free(ids)
        assert manager.quiesce() and manager.ftensor.mapped_bytes == 0
        with pytest.raises(BlockError, match="freed twice or never issued"):
            manager.free(ids[:1])


@pytest.mark.parametrize("layout", ["chunked", "per-layer"])
@pytest.mark.parametrize("num_kv_buffers", [1, 2], ids=["MLA", "K and V"])
def test_pages_of_a_latent_cache_are_mapped_once(monkeypatch, layout, num_kv_buffers):
    """One buffer a layer: mapped as K and as V it took the memory twice."""
    monkeypatch.setenv("KVCACHED_MAX_RESERVED_MB", "0")
    monkeypatch.setenv("KVCACHED_LAYOUT", layout)
    manager = make(cell_size=1152 * 2, block_size=64, num_kv_buffers=num_kv_buffers)
    geometry, ftensor = manager.geometry, manager.ftensor
    assert geometry.num_buffers == len(ftensor.buffers()) == NUM_LAYERS * num_kv_buffers
    assert (ftensor.mapped_bytes, before := memfd_bytes()) == (0, before)
    views = [np.from_dlpack(buffer) for buffer in ftensor.buffers()]
    size = geometry.block_bytes
    written = 0
    held: list[int] = []
    for pages in (1, 2, 3):
        ids = manager.alloc(geometry.blocks_per_page)
        held += ids
        assert len(set(manager.pages_of(ids))) == 1
        for view in views:
            for block in ids:
                view[block * size : (block + 1) * size] = 1
        written += len(ids) * size * len(views)
        assert ftensor.mapped_bytes == pages * geometry.page_bytes
        assert written <= memfd_bytes() - before <= pages * geometry.page_bytes
        assert geometry.page_bytes - geometry.blocks_per_page * size * len(views) == geometry.waste_bytes
    del view, views
    manager.free(held)
    assert manager.quiesce()
    assert (ftensor.mapped_bytes, memfd_bytes()) == (0, before)


def test_the_last_reference_takes_the_memory_along():
    manager = make()
    manager.alloc(20)
    ftensor = manager.ftensor
    assert ftensor.mapped_bytes > 0 and pagers(1)
    del manager
    gc.collect()
    assert ftensor.mapped_bytes == 0 and pagers(0)

"""Forks of a process with tensors: they are refused, they reach nothing, and they end without harm."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvcached import _core
from kvcached._core import FTensor, Pool
from kvcached.errors import DriverError, KVCachedConfigError
from tests.children import dies_touching, in_fork, run_script
from tests.ranges import GRANULARITY, KIB, LAYOUTS, MIB, host_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A fork of a process with threads is what this is about.
pytestmark = [
    pytest.mark.usefixtures("nothing_stays"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

FIXED = {"device", "geometry", "num_blocks", "num_pages", "id_space", "virtual_bytes", "unbacked"}
FTENSOR_CALLS: dict[str, tuple] = {
    "mapped_bytes": (),
    "cached_bytes": (),
    "leaked_bytes": (),
    "retained_bytes": (),
    "zero_bytes": (),
    "pending_transaction": (),
    "mapped_pages": (),
    "quarantined_pages": (),
    "buffers": (),
    "component": (0, 0, 1),
    "halves": (0,),
    "map": ([1],),
    "unmap": ([0],),
    "prepare_unmap": (9, [0]),
    "commit_unmap": (9,),
    "abort_unmap": (9,),
    "trim": (),
    "synchronise": (),
}
POOL_FIXED = {"ftensor", "memory", "geometry", "num_blocks", "id_space", "null_block"}
POOL_CALLS: dict[str, tuple] = {
    "alloc": (1,),
    "alloc_array": (1,),
    "alloc_into": (np.zeros(1, np.int64),),
    "free": ([0],),
    "claim": ([17],),
    "available_size": (),
    "refresh_credit": (),
    "promised_size": (),
    "held_size": (),
    "free_ids": (),
    "backed_size": (),
    "reserve_demand": (1,),
    "lacks": (1,),
    "keep_on_hand": (1,),
    "quiesce": (),
    "try_to_reserve": (1,),
    "free_reserved": (),
    "begin_epoch": (),
    "release_through": (0,),
    "set_memory_limit": (0,),
    "memory_limit_state": (),
    "trim": (),
    "clear": (),
    "shutdown": (),
    "get_page_occupancy": ([0],),
    "pages_of": ([0],),
    "emptied_by": ([0],),
    "stats": (),
}


def every_call(inherited: Any, calls: dict[str, tuple]) -> Iterator[Callable[[], object]]:
    for name, arguments in calls.items():

        def call(name: str = name, arguments: tuple = arguments) -> object:
            value = getattr(inherited, name)
            return value(*arguments) if callable(value) else value

        yield call


def refuses_all(calls: list[Callable[[], object]], owner: int) -> None:
    for number, call in enumerate(calls):
        with pytest.raises((DriverError, KVCachedConfigError), match=rf"\b{owner}\b"):
            pytest.fail(f"call {number} returned {call()!r}")


class Parent:
    """A process with a record, a pool of which some blocks are held, and tensors that were written."""

    def __init__(self, layout: str = "chunked") -> None:
        self.record = _core.InstanceRecord(f"test-fork-{os.getpid()}", "test", "cpu")
        self.ftensor = host_range(layout, num_blocks=2000, cache_bytes=MIB)
        self.pool = Pool(self.ftensor, max_reserved_bytes=0, record=self.record, pool_name="kv")
        self.ids = self.pool.alloc(10)
        self.buffer = self.ftensor.buffers()[1]
        self.view = np.from_dlpack(self.ftensor.component(1, 0, 4 * KIB))
        self.bytes = np.from_dlpack(self.buffer)
        self.view[self.ids] = 5
        self.stats = self.pool.stats()
        self.free = _core.mem_info("cpu")[0]

    def calls(self) -> list[Callable[[], object]]:
        return [
            *every_call(self.ftensor, FTENSOR_CALLS),
            *every_call(self.pool, POOL_CALLS),
            lambda: Pool(self.ftensor),
            lambda: Pool(host_range(), record=self.record),
            lambda: self.buffer.__dlpack__(),
            lambda: self.buffer.__dlpack__(max_version=(1, 0)),
        ]

    def check_intact(self) -> None:
        assert (self.view[self.ids] == 5).all()
        assert self.pool.stats() == self.stats and _core.mem_info("cpu")[0] == self.free
        assert self.ftensor.mapped_pages() == self.pool.pages_of(self.ids[::4])
        self.pool.free(self.ids)
        self.ids = self.pool.alloc(10)
        self.view[self.ids] = 5
        row = instances()[self.record.name]
        assert row["pid"] == os.getpid() and [pool["name"] for pool in row["pools"]] == ["kv"]

    def __enter__(self) -> Parent:
        return self

    def __exit__(self, *_: object) -> None:
        assert os.path.exists(self.record.path)
        self.pool.shutdown()
        self.record.close()
        assert not os.path.exists(self.record.path)


def instances() -> dict[str, dict]:
    code = "import sys; from kvcached._kvctl import main; sys.argv[1:] = ['list', '--json']; raise SystemExit(main())"
    return {row["name"]: row for row in json.loads(run_script(code).stdout)["instances"]}


def test_every_call_of_a_fork_is_refused_and_names_the_owner():
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(FTensor) == FIXED | set(FTENSOR_CALLS)
    assert public(Pool) == POOL_FIXED | set(POOL_CALLS)
    owner = os.getpid()
    with Parent() as parent:
        assert in_fork(lambda: refuses_all(parent.calls(), owner)) == (0, "")

        def fixed() -> None:
            assert parent.ftensor.num_blocks == parent.pool.num_blocks == 2000
            assert [getattr(parent.ftensor, name) for name in sorted(FIXED - {"geometry"})] == values

        values = [getattr(parent.ftensor, name) for name in sorted(FIXED - {"geometry"})]
        assert in_fork(fixed) == (0, "")
        parent.check_intact()
        # What refuses a fork serves its parent.
        with pytest.raises(pytest.fail.Exception, match="call 0 returned"):
            refuses_all(parent.calls()[:1], owner)


def test_a_fork_does_not_wait_for_locks_of_threads_that_it_does_not_have():
    """Threads of the parent hold the pool's lock much of the time: `clear` does so for as long as it has many pages."""
    ftensor = host_range(num_blocks=200_000)
    pool = Pool(ftensor)
    stop = threading.Event()

    def hammer(call: Callable[[], object]) -> None:
        while not stop.is_set():
            call()

    def map_and_unmap() -> None:
        ftensor.map([100])
        ftensor.unmap([100])

    calls = (pool.clear, pool.clear, map_and_unmap)
    threads = [threading.Thread(target=hammer, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    owner = os.getpid()

    def body() -> None:
        refuses_all([*every_call(pool, POOL_CALLS), *every_call(ftensor, FTENSOR_CALLS)], owner)

    try:
        outcomes = {in_fork(body, seconds=10) for _ in range(50)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert outcomes == {(0, "")}
    assert pool.held_size() == 0


def test_a_fork_opens_a_device_while_threads_of_its_parent_do():
    """The table of opened devices is locked for a moment in each of their calls, and so is that of all caches."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            _core.mem_info("cpu")

    def make() -> None:
        while not stop.is_set():
            host_range(cache_bytes=MIB)

    threads = [threading.Thread(target=body) for body in (look, look, make)]
    for thread in threads:
        thread.start()

    def body() -> None:
        own = host_range(cache_bytes=MIB)
        own.map([0])
        assert _core.mem_info("cpu")[0] > 0

    try:
        outcomes = {in_fork(body, seconds=10) for _ in range(50)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert outcomes == {(0, "")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fork_does_not_reach_its_parents_memory(layout):
    def write(view: np.ndarray) -> None:
        view[...] = 9

    with Parent(layout) as parent:
        for view in (parent.view[parent.ids[0]], parent.bytes[: 4 * KIB]):
            assert view.any()
            assert dies_touching(view.any)
            assert dies_touching(lambda view=view: write(view))
        parent.check_intact()


def test_a_fork_makes_tensors_of_its_own():
    def body() -> None:
        own = host_range(unbacked="zero", cache_bytes=MIB)
        pool = Pool(own)
        record = _core.InstanceRecord(f"test-fork-{os.getpid()}", "test", "cpu")
        ids = pool.alloc(20)
        view = np.from_dlpack(own.component(0, 0, 4 * KIB))
        assert not view.any()
        view[ids] = 1
        assert view[ids].sum() == 20 * 4 * KIB
        pool.free(ids)
        pool.shutdown()
        record.close()
        assert own.mapped_bytes == 0
        # And its own forks are refused those.
        owner = os.getpid()
        calls = [*every_call(own, FTENSOR_CALLS), *every_call(pool, POOL_CALLS)]
        assert in_fork(lambda: refuses_all(calls, owner)) == (0, "")

    with Parent() as parent:
        assert in_fork(body) == (0, "")
        parent.check_intact()


def collect_everything(parent: Parent) -> None:
    vars(parent).clear()
    gc.collect()


FORK_ENDS: dict[str, tuple[Callable[[Parent], object], int]] = {
    "returns": (lambda _: None, 0),
    "os._exit": (lambda _: os._exit(3), 3),
    "collects": (collect_everything, 0),
    "is killed": (lambda _: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "closes the record": (lambda parent: parent.record.close(), 0),
}


@pytest.mark.parametrize("end", FORK_ENDS)
def test_the_end_of_a_fork_changes_nothing_in_its_parent(end):
    body, code = FORK_ENDS[end]
    with Parent() as parent:
        assert in_fork(lambda: body(parent)).code == code
        parent.check_intact()


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "del p, t, b, v, r; gc.collect()", "os._exit(0)"])
def test_the_exit_of_a_forked_interpreter_changes_nothing_in_its_parent(end):
    """The whole exit: atexit handlers, module globals, destructors."""
    code = (
        "import atexit, gc, os, sys; import numpy as np\n"
        "from kvcached import _core\n"
        "from kvcached.instance import hardware, process_record\n"
        f"g = _core.Geometry.solve(4, 4096, {GRANULARITY}, page_bytes=65536)\n"
        "t = _core.FTensor('cpu', g, 50, cache_bytes=1 << 20); r = process_record('test 1', 'cpu', [hardware('cpu')])\n"
        "p = _core.Pool(t, record=r, max_reserved_bytes=0); b = t.buffers()[0]; v = np.from_dlpack(b)\n"
        "ids = p.alloc(4); v[:16384] = 5; before = p.stats()\n"
        "if os.fork() == 0:\n"
        f"    {end}\n"
        "else:\n"
        "    assert os.wait()[1] == 0\n"
        "    assert (v[:16384] == 5).all() and p.stats() == before and os.path.exists(r.path)\n"
        "    p.free(ids); assert p.quiesce() and t.mapped_bytes == 0\n"
        "    print('intact')\n"
    )
    done = run_script(code, KVCACHED_IPC_NAME=f"test-exit-{os.getpid()}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "intact\n", "")


def test_multiprocessing_forks():
    context = multiprocessing.get_context("fork")
    owner = os.getpid()
    queue = context.SimpleQueue()

    def body(parent: Parent) -> None:
        refuses_all(parent.calls(), owner)
        own = host_range()
        own.map([0])
        queue.put(own.mapped_pages())

    with Parent() as parent:
        processes = [context.Process(target=body, args=(parent,)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert [queue.get() for _ in processes] == [[0]] * 3
        parent.check_intact()
    queue.close()
    del processes, process

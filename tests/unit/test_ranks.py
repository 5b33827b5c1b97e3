"""Several worker processes and their coordinator, on the host backend: tensors in the workers, the pool here."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvcached import _core
from kvcached._core import Pool, Ranks, RankServer
from kvcached.errors import (
    DriverError,
    KVCachedConfigError,
    KVCachedError,
    StateConsistencyError,
)
from tests.children import in_fork
from tests.ranges import KIB, host_range

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_stays", "own_sockets")

BLOCKS = 64
PAGE = 64 * KIB


def serve(pipe: Any, stage: int, rank: int) -> None:
    """A worker: its memory, and what it is asked through the pipe."""
    server = RankServer(stage=stage, rank=rank)
    ftensor = host_range(num_blocks=BLOCKS)
    server.add_group(ftensor)
    view = np.from_dlpack(ftensor.component(1, 0, 4 * KIB))
    pipe.send(server.address)
    while (request := pipe.recv()) is not None:
        word, *arguments = request
        if word == "mapped":
            pipe.send(ftensor.mapped_pages())
        elif word == "write":
            ids, value = arguments
            view[ids] = value
            pipe.send(None)
        elif word == "read":
            pipe.send(view[arguments[0]].max(axis=1).tolist())
        elif word == "fork":
            if (child := os.fork()) == 0:
                signal.pause()
            pipe.send(child)
        elif word == "times":
            pipe.send([word for word, _ in server.take_times()])
    server.stop()
    server.stop()
    pipe.send(ftensor.mapped_pages())


class Worker:
    def __init__(self, stage: int, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.stage, self.rank = stage, rank
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, stage, rank), daemon=True)
        self.process.start()
        theirs.close()

    def start(self) -> None:
        self.address = self.ask_nothing()

    def ask_nothing(self) -> Any:
        assert self.pipe.poll(60), "a worker says nothing"
        return self.pipe.recv()

    def ask(self, *request: Any) -> Any:
        self.pipe.send(request)
        return self.ask_nothing()

    def end(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(OSError, EOFError):
                self.pipe.send(None)
                self.ask_nothing()
        self.process.join(10)
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextlib.contextmanager
def workers(count: int, stages: int = 1) -> Iterator[list[Worker]]:
    per_stage = count // stages
    started = [Worker(number // per_stage, number % per_stage) for number in range(count)]
    try:
        for worker in started:
            worker.start()
        yield started
    finally:
        for worker in started:
            worker.end()


def over(started: list[Worker], **options: Any) -> Ranks:
    return Ranks([(worker.stage, worker.rank, worker.address) for worker in started], **options)


def pool_over(ranks: Ranks, **options: Any) -> Pool:
    geometry = host_range(num_blocks=BLOCKS).geometry
    return Pool(ranks, geometry=geometry, num_blocks=BLOCKS, max_reserved_bytes=0, **options)


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (2, 1), (4, 2)])
def test_a_pool_here_backs_tensors_there(count: int, stages: int) -> None:
    with workers(count, stages) as started:
        ranks = over(started)
        assert (ranks.num_members, ranks.num_pages) == (count, BLOCKS // 4)
        assert (ranks.page_bytes, ranks.blocks_per_page, ranks.ids_per_page) == (PAGE, 4, 16)
        assert ranks.virtual_bytes == host_range(num_blocks=BLOCKS).virtual_bytes
        pool = pool_over(ranks, reserve_null_block=True)
        assert pool.memory is ranks
        ids = pool.alloc(9)
        assert ids is not None
        assert [worker.ask("mapped") for worker in started] == [[0, 1, 2]] * count
        for number, worker in enumerate(started):
            worker.ask("write", ids, number + 1)
        assert [worker.ask("read", ids) for worker in started] == [[n + 1] * 9 for n in range(count)]
        pool.free(ids)
        assert pool.quiesce()
        assert [worker.ask("mapped") for worker in started] == [[0]] * count, "but for the null block"
        assert pool.alloc(4) is not None
        if count > 1:
            assert {"map", "prepare", "commit"} <= set(started[0].ask("times"))
            assert started[0].ask("times") == []
        pool.shutdown()
        assert [worker.ask("mapped") for worker in started] == [[]] * count
        assert (ranks.broken, ranks.beside_bytes) == (None, 0)


def test_ranks_are_mapped_and_unmapped_without_a_pool() -> None:
    with workers(2) as started:
        ranks = over(started, timeout_s=5)
        assert ranks.map([0, 3]) == [0, 3]
        assert ranks.map(np.array([3, 4])) == [4]
        ranks.unmap([3])
        ranks.synchronise()
        assert ranks.room() > 0 and ranks.trim() == 0
        with pytest.raises(ValueError, match="page 16 is outside a group of 16 pages"):
            ranks.map([16])
        ranks.close()
        ranks.close()
        with pytest.raises(KVCachedError, match="were closed"):
            ranks.map([1])
        later = over(started)
        assert [worker.ask("mapped") for worker in started] == [[0]] * 2, "page 0 is kept, the rest is not"
        assert later.map([0, 1]) == [1]
        later.close()


def test_a_worker_that_is_killed_breaks_the_pool_and_leaves_no_socket() -> None:
    with workers(2) as started:
        ranks = over(started)
        pool = pool_over(ranks)
        assert pool.alloc(5) is not None
        begin = time.monotonic()
        started[1].process.kill()
        while ranks.broken is None:
            assert time.monotonic() - begin < 5
            time.sleep(0.001)
        with pytest.raises(StateConsistencyError, match=r"rank 1.* its process has ended"):
            pool.alloc(1)
        assert time.monotonic() - begin < 1
        with pytest.raises(StateConsistencyError, match="rank 1"):
            pool.shutdown()
        started[1].process.join()
        while os.path.exists(started[1].address):
            assert time.monotonic() - begin < 5, "the socket of the dead is left"
            time.sleep(0.001)
        assert os.path.exists(started[0].address)


def test_a_worker_that_is_killed_is_noticed_although_a_fork_of_it_lives() -> None:
    with workers(2) as started:
        ranks = over(started)
        child = started[1].ask("fork")
        try:
            begin = time.monotonic()
            started[1].process.kill()
            while ranks.broken is None or os.path.exists(started[1].address):
                assert time.monotonic() - begin < 1, (
                    ranks.broken,
                    "the fork has its connection and its socket open",
                )
                time.sleep(0.001)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def stop(worker: Worker) -> None:
    """Returns once every thread of it stands still: `kill` alone returns before that."""
    pid = worker.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_worker_that_hangs_is_lost_at_the_deadline() -> None:
    with workers(2) as started:
        ranks = over(started, timeout_s=0.6)
        stop(started[0])
        try:
            begin = time.monotonic()
            with pytest.raises(StateConsistencyError, match="rank 0"):
                ranks.map([1])
            assert 0.5 < time.monotonic() - begin < 1.6
        finally:
            os.kill(started[0].process.pid or 0, signal.SIGCONT)
        assert started[1].ask("mapped") == [], "the survivor has undone it"
        ranks.close()


def test_frames_go_through_an_rpc_of_the_engine() -> None:
    servers = [RankServer(rank=rank) for rank in range(2)]
    tensors = [host_range(num_blocks=BLOCKS) for _ in servers]
    for server, ftensor in zip(servers, tensors, strict=True):
        server.add_group(ftensor, 4)
    asked: list[tuple[int, int]] = []
    failing = False

    def call(stage: int, rank: int, frame: bytes) -> bytes:
        asked.append((stage, rank))
        if failing and rank == 1:
            raise RuntimeError("the actor died")
        return servers[rank].answer(frame)

    ranks = Ranks.over_callable(call, [(0, 0), (0, 1)], group=4)
    pool = pool_over(ranks)
    ids = pool.alloc(6)
    assert ids is not None
    assert [ftensor.mapped_pages() for ftensor in tensors] == [[0, 1]] * 2
    assert set(asked) == {(0, 0), (0, 1)}
    failing = True
    with pytest.raises(StateConsistencyError, match=r"rank 1.*the actor died"):
        pool.alloc(9)
    with pytest.raises(DriverError, match="not a frame"):
        servers[0].answer(b"no frame")
    del pool
    ranks.close()
    for server in servers:
        server.stop()
        with pytest.raises(KVCachedError, match="was stopped"):
            server.answer(b"")


def test_a_fork_leaves_ranks_and_servers_to_its_parent() -> None:
    server, ftensor = RankServer(), host_range(num_blocks=BLOCKS)
    server.add_group(ftensor)
    ranks = Ranks([(0, 0, server.address)])
    ranks.map([1])
    inherited = [server, ranks]

    def child() -> None:
        for refused in (
            lambda: ranks.map([2]),
            lambda: ranks.synchronise(),
            lambda: server.answer(b""),
            lambda: server.add_group(host_range(), 1),
        ):
            with pytest.raises(DriverError, match=rf"process {os.getppid()}\b"):
                refused()
        server.stop()
        ranks.close()
        inherited.clear()

    outcome = in_fork(child)
    assert outcome.code == 0, outcome.said
    assert ranks.map([2]) == [2] and os.path.exists(server.address)
    ranks.close()
    server.stop()


def test_arguments_that_cannot_be_are_refused() -> None:
    server, ftensor = RankServer(stage=1, rank=2), host_range(num_blocks=BLOCKS)
    assert (server.stage, server.rank) == (1, 2)
    server.add_group(ftensor)
    with pytest.raises(KVCachedConfigError, match="serves group 0 already"):
        server.add_group(ftensor)
    with pytest.raises(KVCachedConfigError, match="there are none"):
        Ranks([])
    with pytest.raises(KVCachedConfigError, match="named twice"):
        Ranks([(1, 2, server.address)] * 2)
    with pytest.raises(KVCachedError, match="cannot connect to /nowhere"):
        Ranks([(1, 2, "/nowhere")])
    with pytest.raises(StateConsistencyError, match="stage 0"):
        Ranks([(0, 0, server.address)])
    for timeout_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_s"):
            Ranks([(1, 2, server.address)], timeout_s=timeout_s)
    ranks = Ranks([(1, 2, server.address)])
    with pytest.raises(TypeError, match="geometry= and num_blocks="):
        Pool(ranks)
    with pytest.raises(TypeError, match="over an FTensor or Ranks, not int"):
        Pool(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="68 blocks need 17 pages"):
        Pool(ranks, geometry=ftensor.geometry, num_blocks=BLOCKS + 4)
    with pytest.raises(ValueError, match="pages of 1 blocks"):
        geometry = _core.Geometry.solve(1, PAGE, PAGE, page_bytes=PAGE)
        Pool(ranks, geometry=geometry, num_blocks=1)
    pool = Pool(ranks, geometry=ftensor.geometry, num_blocks=BLOCKS)
    with pytest.raises(AttributeError, match="those of its ranks"):
        _ = pool.ftensor
    pool.shutdown()
    ranks.close()
    server.stop()


def test_a_directory_that_others_may_enter_is_refused(own_sockets: pathlib.Path) -> None:
    server = RankServer()
    assert pathlib.Path(server.address).parent == own_sockets
    server.stop()
    own_sockets.chmod(0o755)
    with pytest.raises(
        KVCachedConfigError, match=r"has mode 0755 and is open to other users; run: chmod 700"
    ):
        RankServer()


def test_the_timeout_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RankServer()
    server.add_group(host_range(num_blocks=BLOCKS))
    monkeypatch.setenv("KVCACHED_IPC_TIMEOUT", "soon")
    with pytest.raises(KVCachedConfigError, match="KVCACHED_IPC_TIMEOUT='soon'"):
        Ranks([(0, 0, server.address)])
    monkeypatch.setenv("KVCACHED_IPC_TIMEOUT", "2.5")
    Ranks([(0, 0, server.address)]).close()
    server.stop()

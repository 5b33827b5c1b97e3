"""Unmapping in two steps on the host backend, and the errors of calls that the system refuses."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvcached import _core
from kvcached._core import FTensor, Geometry
from kvcached.errors import (
    DriverError,
    KVCachePoolExhausted,
    MapQuarantinedError,
    StateConsistencyError,
)
from tests.children import dies_touching, in_fork
from tests.ranges import GRANULARITY, KIB, LAYOUTS, host_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_stays")


def memfd() -> int:
    """The descriptor of the memory behind this process's tensors."""
    names = {fd: f"/proc/self/fd/{fd}" for fd in map(int, os.listdir("/proc/self/fd"))}
    found = [
        fd for fd, name in names.items() if os.path.islink(name) and "memfd:kvcached" in os.readlink(name)
    ]
    assert len(found) == 1, found
    return found[0]


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Memory can neither be mapped nor given back meanwhile: its descriptor names another file."""
    fd = memfd()
    kept = os.dup(fd)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)


def memory_behind() -> int:
    return os.fstat(memfd()).st_blocks * 512


def row_of(ftensor: FTensor, page: int) -> np.ndarray:
    """All of the first block of a page in the third buffer."""
    geometry = ftensor.geometry
    view = np.from_dlpack(ftensor.component(2, 0, geometry.block_bytes))
    return view[geometry.block_id(page * geometry.blocks_per_page)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unbacked", ["hole", "zero"])
def test_an_abort_brings_the_content_back(layout, unbacked):
    ftensor = host_range(layout, unbacked=unbacked)
    ftensor.map([0, 1, 2])
    rows = [row_of(ftensor, page) for page in range(3)]
    for page, row in enumerate(rows):
        row[:] = np.arange(len(row)) % 50 + page
    before = memory_behind()
    ftensor.prepare_unmap(7, [2, 0])
    assert (ftensor.pending_transaction, ftensor.retained_bytes) == (7, 2 * 64 * KIB)
    assert ftensor.mapped_pages() == [1] and memory_behind() == before
    if unbacked == "zero":
        assert not rows[0].any() and not rows[2].any()
    else:
        died = dies_touching(rows[0].any)
        assert died
    assert rows[1][3] == 4
    ftensor.abort_unmap(7)
    assert (ftensor.pending_transaction, ftensor.retained_bytes) == (None, 0)
    assert ftensor.mapped_pages() == [0, 1, 2]
    for page, row in enumerate(rows):
        assert (row == np.arange(len(row)) % 50 + page).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unbacked", ["hole", "zero"])
def test_a_commit_gives_the_memory_back(layout, unbacked):
    ftensor = host_range(layout, unbacked=unbacked)
    ftensor.map([0, 1])
    row_of(ftensor, 0)[:] = 1
    free, held = _core.mem_info("cpu")[0], memory_behind()
    ftensor.prepare_unmap(1, [0])
    assert _core.mem_info("cpu")[0] == free
    ftensor.commit_unmap(1)
    assert _core.mem_info("cpu")[0] == free + 64 * KIB and memory_behind() < held
    assert ftensor.mapped_pages() == [1] and ftensor.retained_bytes == 0
    ftensor.map([0])
    assert not row_of(ftensor, 0).any()


def test_steps_of_a_transaction_may_be_repeated_and_not_be_reversed():
    ftensor = host_range()
    ftensor.map([0, 1, 2])
    ftensor.prepare_unmap(1, [0])
    ftensor.prepare_unmap(1, [0])

    def refused(text: str, call: Callable[..., object], *arguments: Any) -> None:
        with pytest.raises(StateConsistencyError, match=text):
            call(*arguments)

    refused("other pages", ftensor.prepare_unmap, 1, [1])
    refused("1 is pending", ftensor.prepare_unmap, 2, [1])
    refused("not decided", ftensor.map, [0])
    refused("not decided", ftensor.unmap, [1, 0])
    refused("never prepared", ftensor.commit_unmap, 2)
    ftensor.commit_unmap(1)
    ftensor.commit_unmap(1)
    refused("is committed", ftensor.abort_unmap, 1)
    refused("is committed", ftensor.prepare_unmap, 1, [0])
    ftensor.prepare_unmap(2, [1])
    ftensor.abort_unmap(2)
    ftensor.abort_unmap(2)
    refused("is aborted", ftensor.commit_unmap, 2)
    ftensor.abort_unmap(3)  # it overtook its prepare
    refused("is aborted", ftensor.prepare_unmap, 3, [1])
    refused("not mapped", ftensor.prepare_unmap, 4, [0, 1])
    with pytest.raises(ValueError, match="outside the range"):
        ftensor.prepare_unmap(4, [1, 10**6])
    assert ftensor.mapped_pages() == [1, 2] and ftensor.pending_transaction is None
    for number in range(4, 4 + 64):
        ftensor.abort_unmap(number)
    refused("too old", ftensor.commit_unmap, 1)
    assert ftensor.mapped_pages() == [1, 2] and ftensor.mapped_bytes == 2 * 64 * KIB


def test_memory_that_a_commit_could_not_release_goes_with_the_next():
    ftensor = host_range()
    ftensor.map([0, 1])
    free = _core.mem_info("cpu")[0]
    ftensor.prepare_unmap(5, [0, 1])
    with without_memory(), pytest.raises(DriverError, match="commit it again"):
        ftensor.commit_unmap(5)
    assert (ftensor.leaked_bytes, ftensor.pending_transaction) == (2 * 64 * KIB, 5)
    with pytest.raises(StateConsistencyError, match="is committed"):
        ftensor.abort_unmap(5)
    ftensor.commit_unmap(5)
    assert (ftensor.leaked_bytes, ftensor.pending_transaction) == (0, None)
    assert _core.mem_info("cpu")[0] == free + 2 * 64 * KIB


def test_pages_that_an_abort_lost_are_named_and_stay_lost():
    ftensor = host_range()
    ftensor.map([0, 1, 2])
    row_of(ftensor, 1)[:] = 4
    ftensor.prepare_unmap(5, [0, 2])
    with without_memory(), pytest.raises(MapQuarantinedError, match=re.escape("[0, 2]")):
        ftensor.abort_unmap(5)
    with pytest.raises(MapQuarantinedError, match=re.escape("[0, 2]")):
        ftensor.abort_unmap(5)
    assert ftensor.quarantined_pages() == [0, 2] and ftensor.mapped_pages() == [1]
    with pytest.raises(MapQuarantinedError, match="page 2"):
        ftensor.map([3, 2])
    with pytest.raises(MapQuarantinedError, match="page 0"):
        ftensor.prepare_unmap(6, [0])
    assert (row_of(ftensor, 1) == 4).all()
    ftensor.prepare_unmap(7, [1])
    ftensor.commit_unmap(7)


def test_a_prepare_that_the_system_refuses_leaves_the_other_pages_as_they_were():
    """No address space: the first page is lost, since nobody knows what its unmap did."""

    def body() -> None:
        own = host_range(cache_bytes=0)
        own.map([0, 1, 2])
        row_of(own, 1)[:] = 6
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1, limits[1]))
        try:
            own.prepare_unmap(1, [0, 1])
        except MapQuarantinedError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert "quarantined [0]" in said and "still mapped [1]" in said, said
        assert own.quarantined_pages() == [0] and own.mapped_pages() == [1, 2]
        assert own.pending_transaction is None and (row_of(own, 1) == 6).all()
        own.prepare_unmap(1, [1, 2])
        own.commit_unmap(1)

    assert in_fork(body) == (0, "")


def test_failed_calls_say_whether_pages_were_lost():
    """Errors of `map` and `unmap`: lost pages are one type, a refusal another, shortage a third."""

    def body() -> None:
        os.close(memfd())  # the parent's: ours is made with the first tensors, and is empty
        ftensor = host_range()
        with without_memory(), pytest.raises(DriverError, match="ftruncate"):
            ftensor.map([0])
        assert ftensor.quarantined_pages() == [] and ftensor.mapped_pages() == []
        ftensor.map([0, 1])
        with without_memory(), pytest.raises(DriverError, match=re.escape("memory not given back of [0]")):
            ftensor.unmap([0])
        assert ftensor.quarantined_pages() == [] and ftensor.mapped_pages() == [1]
        assert ftensor.leaked_bytes == 64 * KIB
        ftensor.unmap([1])  # releases both
        assert ftensor.leaked_bytes == 0
        # Memory that was given back is taken again, and can neither be mapped nor be given back.
        with without_memory(), pytest.raises(MapQuarantinedError, match=re.escape("pages [2] are")):
            ftensor.map([2])
        assert ftensor.quarantined_pages() == [2]
        vast = Geometry.solve(1, 4 * KIB, GRANULARITY, page_bytes=1 << 30)
        total = _core.mem_info("cpu")[1]
        huge = FTensor("cpu", vast, total // (4 * KIB) + vast.blocks_per_page)
        with pytest.raises(KVCachePoolExhausted, match="out of memory"):
            huge.map(list(range(huge.num_pages)))
        assert huge.mapped_pages() == []

    assert in_fork(body) == (0, "")

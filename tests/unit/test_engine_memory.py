"""`EngineMemory` without an engine: the pool's epochs."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvcached import instance
from kvcached.errors import BlockError, StateConsistencyError, TermsError
from kvcached.integration import memory as engine_memory
from kvcached.integration.plan import Agreement
from tests.memories import reserved_memory
from tests.ranges import KIB, settled_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.integration.memory import EngineMemory

pytestmark = pytest.mark.usefixtures("nothing_stays")


SETTINGS = SimpleNamespace(
    page_bytes=2 * 4 * 4 * KIB,
    layout="chunked",
    unbacked="hole",
    handle_cache_bytes=0,
    pool_options={"min_reserved_bytes": 0, "max_reserved_bytes": 0, "highest_pages_first": False},
)


@pytest.fixture
def memory() -> Iterator[EngineMemory]:
    """Reserved: pages of 4 blocks, 10 of them."""
    made = reserved_memory(SETTINGS, Agreement(("k", "v"), 4 * KIB, 1, 40))
    yield made
    made.close()


def test_what_is_freed_leaves_when_the_latest_epoch_has_ended(memory):
    pool = memory.open_pool()
    ids = pool.alloc(20)
    first = memory.begin_epoch()
    pool.free(ids)
    second = memory.begin_epoch()
    assert first < second == memory.latest_epoch
    mapped = settled_pages(pool)
    assert len(mapped) == 6, "with page 0, where the null block lies"
    pool.free(pool.alloc(20))
    memory.release_through(first)
    assert settled_pages(pool) == mapped, "used again in the second"
    memory.release_through(second)
    assert settled_pages(pool) == [0]


def test_without_a_pool_there_are_no_epochs(memory):
    def refused() -> None:
        for call in (memory.begin_epoch, lambda: memory.release_through(0)):
            with pytest.raises(StateConsistencyError, match="the pool of this engine is not open"):
                call()
        assert memory.latest_epoch == 0

    refused()
    memory.open_pool()
    memory.close()
    refused()


AGREED = Agreement(("k", "v"), 4 * KIB, 1, 40)


def test_a_start_whose_terms_cannot_be_kept_leaves_no_record(alone, monkeypatch):
    monkeypatch.setenv("KVCACHED_LIMIT", "31K")
    with pytest.raises(
        TermsError, match=r"KVCACHED_LIMIT \(31744 bytes\) is below what an engine needs to start, 32768"
    ):
        reserved_memory(SETTINGS, AGREED)
    monkeypatch.setenv("KVCACHED_LIMIT", "none")
    monkeypatch.setenv("KVCACHED_MIN", "1000T")
    with pytest.raises(TermsError, match="does not fit host"):
        reserved_memory(SETTINGS, AGREED)
    assert not instance.has_record()


def test_a_start_that_fails_later_leaves_no_record_either(alone):
    memory = reserved_memory(SETTINGS, AGREED)
    record = instance.process_record("test", "cpu", [])
    assert os.path.exists(record.path)
    memory.close()
    assert not instance.has_record() and not os.path.exists(record.path)
    started = reserved_memory(SETTINGS, AGREED)
    started.open_pool()
    failed = reserved_memory(SETTINGS, AGREED)
    failed.close()
    assert instance.has_record(), "of the one that runs"
    started.close()
    assert instance.has_record(), "the process keeps its name"


class Cache:
    """Pages of cached blocks, by what `evict` is asked for."""

    def __init__(self, memory: EngineMemory, blocks: int) -> None:
        self.pool = memory.open_pool()
        self.ids = self.pool.alloc(blocks)
        self.asked: list[int] = []
        memory.adopt_cache(self, lambda: True)

    @property
    def cached_bytes(self) -> int:
        return len(self.ids) * 2 * 4 * KIB

    def evict(self, nbytes: int) -> int:
        self.asked.append(nbytes)
        given = self.cached_bytes
        self.pool.free(self.ids)
        self.ids = []
        return given


def test_cached_prefixes_of_an_idle_engine_leave_at_once(memory):
    cache = Cache(memory, 20)
    memory.begin_epoch()  # whose end nobody tells
    assert memory.cached_bytes == 20 * 8 * KIB
    assert memory.give_cached(5, timeout_s=1) == 20 * 8 * KIB
    assert (cache.asked, memory.cached_bytes) == ([5], 0)
    assert settled_pages(cache.pool) == [0]


def test_where_nothing_is_cached_nothing_is_given(memory):
    assert (memory.cached_bytes, memory.give_cached(1 << 40, timeout_s=0)) == (0, 0)
    memory.open_pool()
    assert (memory.cached_bytes, memory.give_cached(1 << 40, timeout_s=0)) == (0, 0)


def test_an_engine_that_does_not_come_to_rest_gives_nothing(memory):
    cache = Cache(memory, 20)
    given = []
    with memory.at_rest:
        for timeout_s in (0, 0.05, -1):  # no timeout waits for ever
            thread = threading.Thread(target=lambda t=timeout_s: given.append(memory.give_cached(1, t)))
            thread.start()
            thread.join()
    assert (given, cache.asked) == ([0, 0, 0], [])
    assert memory.give_cached(1, 0) > 0


def test_a_closed_engine_has_nothing_to_give(memory):
    cache = Cache(memory, 20)
    memory.close()
    assert (memory.cached_bytes, memory.give_cached(1, timeout_s=0)) == (0, 0)
    assert cache.asked == []


def test_an_engine_that_is_closed_meanwhile_has_given_everything(memory):
    cache = Cache(memory, 20)
    evict = cache.evict

    def closed_first(nbytes: int) -> int:
        memory.close()
        return evict(nbytes)

    cache.evict = closed_first
    assert memory.give_cached(1, timeout_s=0) == 0


def test_errors_of_an_open_pool_are_not_hidden(memory):
    cache = Cache(memory, 20)
    cache.pool.free(cache.ids)
    with pytest.raises(BlockError):
        memory.give_cached(1, timeout_s=0)
    assert memory.at_rest.acquire(timeout=0)
    memory.at_rest.release()


def test_much_is_evicted_in_pieces_between_which_the_engine_may_go_on(memory, monkeypatch):
    cache, passed = Cache(memory, 1), []
    cache.evict = lambda nbytes: (cache.asked.append(nbytes), nbytes)[1]

    def engine() -> None:
        passed.append(memory.at_rest.acquire(timeout=0))
        memory.at_rest.release()

    def let_pass(_: float) -> None:
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()

    monkeypatch.setattr(engine_memory, "time", SimpleNamespace(sleep=let_pass, monotonic=lambda: 0.0))
    at_once = engine_memory.EVICTED_AT_ONCE_BYTES
    assert memory.give_cached(2 * at_once + 5, timeout_s=1) == 2 * at_once + 5
    assert cache.asked == [at_once, at_once, 5]
    assert passed == [True] * 3

    pieces = iter([at_once, 7])
    cache.evict = lambda nbytes: next(pieces)
    assert memory.give_cached(9 * at_once, timeout_s=1) == at_once + 7, "no more is cached"

"""Epochs: pages that queued batches may still read stay, whatever order scheduling and outputs come in.

The CPU build schedules no batch ahead; these tests do, as `step_with_batch_queue` does on a GPU.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvcached import _core
from kvcached.config import Settings
from kvcached.integration.launch import Launch
from kvcached.integration.memory import EngineMemory
from kvcached.integration.remote import RemoteRanks
from kvcached.integration.vllm import block_pool, release
from kvcached.integration.vllm.demand import LOOKED_AT, wanted_blocks
from tests.ranges import settled_pages

GEOMETRY = _core.Geometry.solve(2, 8192, 4096, page_bytes=2 * 8192 * 4, tokens_per_block=16)


class Scheduler:
    """As much of vLLM's scheduler as the seams look at."""

    def __init__(self) -> None:
        self.pool = _core.Pool(
            _core.FTensor("cpu", GEOMETRY, 41),
            reserve_null_block=True,
            async_sched=True,
            max_reserved_bytes=0,
        )
        native = BlockPool(41, True, hash_block_size=16)
        block_pool.overlay_block_pool(native, self.pool)
        self.kv_cache_manager = SimpleNamespace(block_pool=native)
        self.cache_config = SimpleNamespace()
        self.memory = EngineMemory(
            Launch(Settings(), "vllm", "test"), SimpleNamespace(synchronise=self.pool.ftensor.synchronise)
        )
        self.memory.pool = self.pool
        self.memory.adopt_cache(native, lambda: not self.has_unfinished_requests())
        self.memory.attach(self.cache_config)
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.skipped_waiting: list[Any] = []
        self.during_schedule = self.during_update = lambda: None
        self.scheduled_tokens = 1
        self.unfinished = True

    def has_unfinished_requests(self):
        return self.unfinished

    @release.begin_step
    def schedule(self, throttle_prefills=False):
        self.during_schedule()
        return SimpleNamespace(total_num_scheduled_tokens=self.scheduled_tokens)

    @release.end_step
    def update_from_output(self, scheduler_output, model_runner_output):
        self.during_update()
        return {}

    @release.undisturbed
    def finish_requests(self, request_ids, finished_status):
        self.during_update()
        return []

    def cached_blocks(self, count: int) -> list:
        """Allocated and with content; the null block's page is full of others."""
        native = self.kv_cache_manager.block_pool
        native.get_new_blocks(3)
        blocks = native.get_new_blocks(count)
        for number, block in enumerate(blocks):
            content = make_block_hash_with_group_id(BlockHash(number.to_bytes(32, "big")), 0)
            native._insert_block_hash(content, block, num_tokens=16)
        return blocks

    @property
    def mapped(self) -> int:
        return len(settled_pages(self.pool))


@pytest.fixture
def scheduler():
    made = Scheduler()
    yield made
    made.pool.shutdown()


def test_freed_while_the_next_batch_is_queued(scheduler):
    native = scheduler.kv_cache_manager.block_pool
    first = scheduler.schedule()
    blocks = native.get_new_blocks(8)
    second = scheduler.schedule()  # reads the blocks too, and is queued behind the first
    scheduler.during_update = lambda: native.free_blocks(blocks)
    scheduler.update_from_output(first, None)  # the request ended
    scheduler.during_update = lambda: None
    assert scheduler.mapped == 3
    assert scheduler.pool.stats()["retired_pages"] == 2
    scheduler.update_from_output(second, None)
    assert scheduler.mapped == 1


def test_the_last_batch_s_output_is_never_asked_for(scheduler):
    """`LLM.generate` stops stepping when the last request has ended, with one more batch queued."""
    native = scheduler.kv_cache_manager.block_pool
    first = scheduler.schedule()
    blocks = native.get_new_blocks(8)
    scheduler.schedule()
    scheduler.unfinished = False
    scheduler.during_update = lambda: native.free_blocks(blocks)
    scheduler.update_from_output(first, None)
    assert scheduler.mapped == 1


def test_freed_with_nothing_queued(scheduler):
    native = scheduler.kv_cache_manager.block_pool
    step = scheduler.schedule()
    blocks = native.get_new_blocks(8)
    scheduler.update_from_output(step, None)
    native.free_blocks(blocks)  # an abort between two steps
    assert scheduler.mapped == 1


def test_preempted_in_a_batch_waits_for_that_batch(scheduler):
    native = scheduler.kv_cache_manager.block_pool
    first = scheduler.schedule()
    blocks = native.get_new_blocks(8)
    scheduler.during_schedule = lambda: native.free_blocks(blocks)
    second = scheduler.schedule()
    scheduler.update_from_output(first, None)
    assert scheduler.mapped == 3
    scheduler.update_from_output(second, None)
    assert scheduler.mapped == 1


def test_a_batch_that_never_comes_back_is_covered_by_the_next(scheduler):
    native = scheduler.kv_cache_manager.block_pool
    scheduler.schedule()
    blocks = native.get_new_blocks(8)
    native.free_blocks(blocks)
    assert scheduler.mapped == 3
    scheduler.update_from_output(scheduler.schedule(), None)
    assert scheduler.mapped == 1


def test_outputs_of_others_end_nothing(scheduler):
    native = scheduler.kv_cache_manager.block_pool
    scheduler.schedule()
    native.free_blocks(native.get_new_blocks(8))
    scheduler.update_from_output(SimpleNamespace(), None)
    assert scheduler.mapped == 3


def given_by_another_thread(memory: EngineMemory, nbytes: int, timeout_s: float = 5.0) -> int:
    given = []
    thread = threading.Thread(target=lambda: given.append(memory.give_cached(nbytes, timeout_s)))
    thread.start()
    thread.join()
    return given[0]


PAGE = GEOMETRY.page_bytes


class TestCachedPrefixes:
    def test_leave_an_engine_at_rest_at_once(self, scheduler):
        native, memory = scheduler.kv_cache_manager.block_pool, scheduler.memory
        scheduler.unfinished = False
        step = scheduler.schedule()
        native.free_blocks(scheduler.cached_blocks(16))
        scheduler.update_from_output(step, None)
        assert (scheduler.mapped, memory.cached_bytes) == (5, 4 * PAGE)
        assert given_by_another_thread(memory, PAGE) == PAGE
        assert (scheduler.mapped, memory.cached_bytes) == (4, 3 * PAGE)
        assert given_by_another_thread(memory, 1 << 60) == 3 * PAGE
        assert given_by_another_thread(memory, 1 << 60) == 0
        assert (scheduler.mapped, memory.cached_bytes) == (1, 0)

    def test_wait_for_batches_that_may_read_them(self, scheduler):
        native, memory = scheduler.kv_cache_manager.block_pool, scheduler.memory
        first = scheduler.schedule()
        blocks = scheduler.cached_blocks(8)
        second = scheduler.schedule()
        scheduler.during_update = lambda: native.free_blocks(blocks)
        scheduler.update_from_output(first, None)
        scheduler.during_update = lambda: None
        assert given_by_another_thread(memory, 1 << 60) == 2 * PAGE
        assert scheduler.mapped == 3
        assert scheduler.pool.stats()["retired_pages"] == 2
        scheduler.update_from_output(second, None)
        assert scheduler.mapped == 1

    def test_of_an_idle_engine_whose_last_output_nobody_asked_for(self, scheduler):
        """All requests were aborted with a batch queued, and whoever drives the engine steps no more."""
        native, memory = scheduler.kv_cache_manager.block_pool, scheduler.memory
        scheduler.schedule()
        blocks = scheduler.cached_blocks(8)
        scheduler.unfinished = False
        scheduler.during_update = lambda: native.free_blocks(blocks)
        scheduler.finish_requests(None, None)
        assert given_by_another_thread(memory, PAGE) == PAGE
        assert scheduler.mapped == 2
        assert memory.ended_epoch == memory.latest_epoch

    def test_of_workers_that_only_the_engine_s_thread_may_call(self, scheduler):
        native, memory = scheduler.kv_cache_manager.block_pool, scheduler.memory
        scheduler.schedule()
        native.free_blocks(scheduler.cached_blocks(8))
        scheduler.unfinished = False
        memory.ranks = RemoteRanks(memory.launch, lambda timeout_s: pytest.fail("called by another thread"))
        assert given_by_another_thread(memory, 1 << 60) == 2 * PAGE
        assert scheduler.mapped == 3
        scheduler.update_from_output(scheduler.schedule(), None)
        assert scheduler.mapped == 1

    @pytest.mark.parametrize("call", ["schedule", "update_from_output", "finish_requests"])
    def test_no_other_thread_takes_blocks_while_the_scheduler_is_at_work(self, scheduler, call):
        native, memory = scheduler.kv_cache_manager.block_pool, scheduler.memory
        step = scheduler.schedule()
        native.free_blocks(scheduler.cached_blocks(8))
        scheduler.unfinished = True
        given = []

        def meanwhile() -> None:
            given.append(given_by_another_thread(memory, 1 << 60, timeout_s=0.05))

        scheduler.during_schedule = scheduler.during_update = meanwhile
        arguments = {"schedule": (), "update_from_output": (step, None), "finish_requests": (None, None)}
        getattr(scheduler, call)(*arguments[call])
        assert given == [0]
        assert memory.cached_bytes == 2 * PAGE
        assert given_by_another_thread(memory, 1 << 60, timeout_s=0) == 2 * PAGE

    def test_an_engine_that_starves_gives_too(self, scheduler, monkeypatch):
        """While it waits for memory it is at rest: two that starve would else wait for each other."""
        native, memory = scheduler.kv_cache_manager.block_pool, scheduler.memory
        native.free_blocks(scheduler.cached_blocks(8))
        given = []

        def sleep(_: float) -> None:
            given.append(given_by_another_thread(memory, PAGE, timeout_s=0))

        monkeypatch.setattr(release, "time", SimpleNamespace(sleep=sleep))
        scheduler.during_schedule = lambda: setattr(native.ledger, "refused", True)
        scheduler.scheduled_tokens = 0
        scheduler.schedule()
        assert given == [PAGE]

    def test_an_error_in_a_step_leaves_the_engine_at_rest(self, scheduler):
        native, memory = scheduler.kv_cache_manager.block_pool, scheduler.memory
        native.free_blocks(scheduler.cached_blocks(8))

        def fail() -> None:
            raise ValueError("a bug")

        scheduler.during_schedule = fail
        with pytest.raises(ValueError, match="a bug"):
            scheduler.schedule()
        assert given_by_another_thread(memory, PAGE, timeout_s=0) == PAGE

    def test_the_cap_holds_at_the_end_of_a_step_and_after_an_abort(self, scheduler):
        native = scheduler.kv_cache_manager.block_pool
        native.most_cached = 8
        step = scheduler.schedule()
        blocks = scheduler.cached_blocks(24)
        scheduler.during_update = lambda: native.free_blocks(blocks[:12])
        scheduler.update_from_output(step, None)
        assert (native.cached_bytes, scheduler.mapped) == (2 * PAGE, 6)
        scheduler.during_update = lambda: native.free_blocks(blocks[12:])
        scheduler.finish_requests(None, None)
        assert (native.cached_bytes, scheduler.mapped) == (2 * PAGE, 3)


def request(tokens: int, computed: int = 0, hashes: tuple[Any, ...] = ()) -> Any:
    """Blocks have 16 tokens."""
    return SimpleNamespace(num_tokens=tokens, num_computed_tokens=computed, block_hashes=hashes)


class TestDemand:
    def test_what_requests_lack_in_all(self, scheduler):
        assert wanted_blocks(scheduler, 16) == 0
        scheduler.running = [request(40, computed=32), request(40, computed=40)]
        scheduler.waiting = [request(33)]
        scheduler.skipped_waiting = [request(16)]
        assert wanted_blocks(scheduler, 16) == 1 + 0 + 3 + 1

    def test_what_is_cached_is_taken_first(self, scheduler):
        native = scheduler.kv_cache_manager.block_pool
        native.free_blocks(scheduler.cached_blocks(4))
        scheduler.waiting = [request(160)]
        assert wanted_blocks(scheduler, 16) == 10 - 4
        scheduler.waiting = [request(48)]
        assert wanted_blocks(scheduler, 16) == 0

    def test_prefixes_that_are_found_are_not_lacking(self, scheduler, monkeypatch):
        native = scheduler.kv_cache_manager.block_pool
        known = {"a", "b", "d"}
        monkeypatch.setattr(native, "get_cached_block", lambda found, _: object() if found in known else None)
        scheduler.waiting = [request(80, hashes=("a", "b", "c", "d"))]
        assert wanted_blocks(scheduler, 16) == 5 - 2

    def test_no_more_are_looked_at_than_are_next(self, scheduler):
        scheduler.waiting = [request(16)] * 1000
        assert wanted_blocks(scheduler, 16) == LOOKED_AT

    def test_others_are_told_at_the_end_of_a_step_and_when_it_is_over(self, scheduler, monkeypatch):
        monkeypatch.setattr(release.time, "sleep", lambda _: None)
        told: list[int] = []
        scheduler.memory.pool = Telling(scheduler.pool, told)
        ledger = scheduler.kv_cache_manager.block_pool.ledger
        scheduler.waiting = [request(33)]
        scheduler.schedule()
        assert told == [], "nothing was refused"
        scheduler.during_schedule = lambda: setattr(ledger, "refused", True)
        scheduler.schedule()
        scheduler.waiting = []
        scheduler.schedule()
        scheduler.during_schedule = lambda: None
        scheduler.schedule()
        assert told == [3, 0], "and not again"


class Telling:
    """A pool that keeps what others are told."""

    def __init__(self, pool: Any, told: list[int]) -> None:
        self._pool, self._told = pool, told

    def lacks(self, blocks: int) -> None:
        self._told.append(blocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def test_a_starving_engine_does_not_spin(scheduler, monkeypatch):
    slept = []
    monkeypatch.setattr(release.time, "sleep", slept.append)
    ledger = scheduler.kv_cache_manager.block_pool.ledger

    def refuse():
        assert not ledger.refused, "a new step asks again"
        ledger.refused = True

    scheduler.during_schedule = refuse
    scheduler.schedule()
    assert not slept, "something was scheduled"
    scheduler.scheduled_tokens = 0
    scheduler.schedule()
    assert slept == [release.STARVED_SLEEP_S]
    scheduler.during_schedule = lambda: None
    scheduler.schedule()
    assert len(slept) == 1


def test_engines_without_memory_pass_through():
    scheduler = Scheduler()
    scheduler.pool.shutdown()
    EngineMemory.detach(scheduler.cache_config)
    output = scheduler.schedule()
    assert not hasattr(output, "_kvcached_epoch")
    assert scheduler.update_from_output(output, None) == {}
    assert scheduler.finish_requests(None, None) == []

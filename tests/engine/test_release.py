"""Epochs: pages that queued batches may still read stay, whatever order scheduling and outputs come in.

The CPU build schedules no batch ahead; these tests do, as `step_with_batch_queue` does on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvcached import _core
from kvcached.config import Settings
from kvcached.integration.launch import Launch
from kvcached.integration.memory import EngineMemory
from kvcached.integration.vllm import block_pool, release
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
        native = BlockPool(41, False, hash_block_size=16)
        block_pool.overlay_block_pool(native, self.pool)
        self.kv_cache_manager = SimpleNamespace(block_pool=native)
        self.cache_config = SimpleNamespace()
        self.memory = EngineMemory(
            Launch(Settings(), "vllm", "test"), SimpleNamespace(synchronise=self.pool.ftensor.synchronise)
        )
        self.memory.pool = self.pool
        self.memory.attach(self.cache_config)
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

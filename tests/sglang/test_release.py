"""Epochs: a page that a launched batch may still touch stays mapped, whatever order launches and results come in.

On a CPU SGLang processes each result before it launches the next batch; these tests do not, as its loop with
overlap does on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import USABLE_BLOCKS, native_allocator

from kvcached.integration.sglang import admission, release
from tests.ranges import settled_pages

PAGE_SIZE = 4
EIGHT_BLOCKS = 8 * PAGE_SIZE


class Scheduler:
    """As much of SGLang's scheduler as the seams look at."""

    def __init__(self, allocator: Any, device: str = "cpu") -> None:
        self.token_to_kv_pool_allocator = allocator
        self.device = device
        self.waiting_queue, self.chunked_req = [], None
        self.running_batch = SimpleNamespace(batch_is_full=False, is_empty=lambda: True)
        self.during_pass = self.during_launch = self.during_results = lambda: None
        self.idled = 0

    @admission.begin_pass
    def get_next_batch_to_run(self, running_batch, last_batch):
        return SimpleNamespace(batch_to_run=self.during_pass(), running_batch=running_batch)

    def decide(self, last_batch="a batch"):
        return self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=last_batch)

    @release.begin_step
    def run_batch(self, batch, pp_proxy_tensors=None):
        self.during_launch()
        return SimpleNamespace(batch=batch)

    @release.end_step
    def process_batch_result(self, batch, result):
        self.during_results()
        return f"results of {batch}"

    @release.settle
    def on_idle(self):
        self.idled += 1

    @property
    def mapped(self) -> int:
        return len(settled_pages(self.token_to_kv_pool_allocator.pool))


@pytest.fixture
def scheduler(elastic) -> Scheduler:
    return Scheduler(elastic(PAGE_SIZE))


@pytest.fixture
def allocator(scheduler):
    return scheduler.token_to_kv_pool_allocator


def test_freed_while_the_next_batch_is_launched(scheduler, allocator):
    row = allocator.alloc(EIGHT_BLOCKS)
    first = scheduler.run_batch("first")
    second = scheduler.run_batch("second")  # writes to the row too, behind the first
    scheduler.during_results = lambda: allocator.free(row)
    assert scheduler.process_batch_result("first", first) == "results of first"
    scheduler.during_results = lambda: None
    assert scheduler.mapped == 3
    scheduler.process_batch_result("second", second)
    assert scheduler.mapped == 1


def test_freed_while_its_own_batch_is_launched(scheduler, allocator):
    row = allocator.alloc(EIGHT_BLOCKS)
    scheduler.during_launch = lambda: allocator.free(row)
    result = scheduler.run_batch("a batch")
    assert scheduler.mapped == 3
    scheduler.process_batch_result("a batch", result)
    assert scheduler.mapped == 1


def test_freed_with_nothing_launched(scheduler, allocator):
    row = allocator.alloc(EIGHT_BLOCKS)
    scheduler.process_batch_result("a batch", scheduler.run_batch("a batch"))
    allocator.free(row)  # an abort, or a flushed cache
    assert scheduler.mapped == 1


def test_results_of_others_end_nothing(scheduler, allocator):
    row = allocator.alloc(EIGHT_BLOCKS)
    scheduler.run_batch("a batch")
    allocator.free(row)
    scheduler.process_batch_result("another", SimpleNamespace())
    assert scheduler.mapped == 3


def test_freed_in_a_pass_that_launches_nothing_it_leaves_when_idle(scheduler, allocator):
    row = allocator.alloc(EIGHT_BLOCKS)
    scheduler.process_batch_result("a batch", scheduler.run_batch("a batch"))
    scheduler.during_pass = lambda: allocator.free(row)
    scheduler.decide()
    assert scheduler.mapped == 3, "for whoever is admitted in this pass"
    scheduler.on_idle()
    assert scheduler.mapped == 1


def test_freed_in_a_pass_that_launches_a_batch_it_leaves_with_that(scheduler, allocator):
    row = allocator.alloc(EIGHT_BLOCKS)
    before = scheduler.run_batch("before")
    scheduler.during_pass = lambda: allocator.free(row)
    scheduler.decide()
    result = scheduler.run_batch("a batch")
    scheduler.process_batch_result("before", before)
    assert scheduler.mapped == 3
    scheduler.process_batch_result("a batch", result)
    assert scheduler.mapped == 1


def test_what_is_freed_can_be_allocated_at_once(scheduler, allocator):
    allocator.pool.budget_pages = 3
    row = allocator.alloc(11 * PAGE_SIZE)
    result = scheduler.run_batch("a batch")
    allocator.free(row)
    again = allocator.alloc(11 * PAGE_SIZE)
    assert again is not None, "later work is queued behind the launched"
    scheduler.process_batch_result("a batch", result)
    assert scheduler.mapped == 3


def test_idle_settles_once(scheduler, allocator, monkeypatch):
    ended = []
    release_through = type(allocator.memory).release_through
    monkeypatch.setattr(
        type(allocator.memory),
        "release_through",
        lambda self, epoch: (ended.append(epoch), release_through(self, epoch))[1],
    )
    row = allocator.alloc(EIGHT_BLOCKS)
    scheduler.run_batch("a batch whose result never comes")
    allocator.free(row)
    for _ in range(3):
        scheduler.on_idle()
    assert scheduler.mapped == 1
    assert scheduler.idled == 3 and len(ended) == 1
    scheduler.decide(last_batch=None)  # an idle pass
    scheduler.on_idle()
    assert len(ended) == 1
    scheduler.run_batch("another")
    scheduler.on_idle()
    assert len(ended) == 2


def test_on_a_gpu_an_event_behind_the_work_ends_the_epoch(elastic, monkeypatch):
    """With overlap behind the stream on which the batch runs, and not behind the scheduler's own."""
    scheduler = Scheduler(elastic(PAGE_SIZE), device="cuda")
    allocator, log = scheduler.token_to_kv_pool_allocator, []
    scheduler.forward_stream, scheduler.enable_overlap = "forward stream", True

    class Event:
        def record(self, stream):
            log.append(f"recorded on {stream}")

        def synchronize(self):
            log.append(f"waited with {scheduler.mapped} pages")

    cuda = SimpleNamespace(Event=Event, current_stream=lambda: "current stream")
    monkeypatch.setattr(release, "torch", SimpleNamespace(cuda=cuda))
    row = allocator.alloc(EIGHT_BLOCKS)
    scheduler.during_launch = lambda: log.append("launched")
    result = scheduler.run_batch("a batch")
    allocator.free(row)
    scheduler.process_batch_result("a batch", result)
    assert log == ["launched", "recorded on forward stream", "waited with 3 pages"]
    assert scheduler.mapped == 1
    scheduler.enable_overlap = False
    scheduler.run_batch("another")
    assert log[-1] == "recorded on current stream"


def test_native_engines_pass_through():
    native = native_allocator(PAGE_SIZE)
    scheduler = Scheduler(native)
    result = scheduler.run_batch("a batch")
    assert vars(result) == {"batch": "a batch"}
    assert scheduler.process_batch_result("a batch", result) == "results of a batch"
    scheduler.on_idle()
    assert scheduler.idled == 1
    assert native.available_size() == USABLE_BLOCKS * PAGE_SIZE

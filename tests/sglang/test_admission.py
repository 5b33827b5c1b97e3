"""What the scheduler admits, by SGLang's own decisions on small fakes over a real allocator: memory runs short, and no
allocation fails after it was decided on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import BLOCKS_PER_PAGE, USABLE_BLOCKS, native_allocator
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver

from kvcached.integration.sglang import admission
from tests.ranges import settled_pages

if TYPE_CHECKING:
    from kvcached.integration.sglang.allocator import ElasticAllocator

PAGE_SIZE = 4


def cache(evictable: int = 0) -> Any:
    """A prefix cache of which so many tokens could be evicted."""
    return SimpleNamespace(evictable_size=lambda: evictable)


class Adder:
    """SGLang's adder as far as the seams look at it. What reaches SGLang's own methods is in `admitted`, by tokens."""

    ceil_paged_tokens = PrefillAdder.ceil_paged_tokens

    def __init__(self, allocator: Any, *, evictable: int = 0, chunk: int | None = None) -> None:
        self.page_size = allocator.page_size
        self.token_to_kv_pool_allocator = allocator
        self.tree_cache = cache(evictable)
        self.rem_chunk_tokens = chunk
        self.cur_rem_token_offset = 0
        self.admitted: list[int] = []

    def _take(self, req: Any) -> int:
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        if self.rem_chunk_tokens is not None:
            tokens = min(tokens, self.rem_chunk_tokens)
            self.rem_chunk_tokens -= self.ceil_paged_tokens(tokens)
        self.cur_rem_token_offset += self.ceil_paged_tokens(tokens) + self.page_size
        self.admitted.append(tokens)
        return tokens

    @admission.secured_request
    def add_one_req(self, req, has_chunked_req, truncation_align_size):
        self._take(req)
        return AddReqResult.CONTINUE

    @admission.secured_chunk
    def add_chunked_req(self, req):
        wanted = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        return req if self._take(req) < wanted else None


def request(tokens: int, prefix: int = 0) -> Any:
    return SimpleNamespace(
        full_untruncated_fill_ids=range(tokens),
        prefix_indices=range(prefix),
        origin_input_ids=range(tokens),
        output_ids=(),
    )


def add(adder: Adder, tokens: int, prefix: int = 0) -> AddReqResult:
    return adder.add_one_req(request(tokens, prefix), False, None)


def prefill(allocator: Any, tokens: list[int]) -> torch.Tensor | None:
    """Allocates as SGLang does for a batch of new requests of so many tokens."""
    lens, none = torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.int64)
    return allocator.alloc_extend(none, none, lens, lens, none - 1, sum(tokens))


@pytest.fixture
def allocator(elastic) -> ElasticAllocator:
    """Memory for three pages: eleven blocks of four tokens."""
    return elastic(PAGE_SIZE, budget_pages=3)


@pytest.fixture
def calls(allocator, monkeypatch):
    """What the driver was asked: how often for its room, and for how many blocks."""
    calls = SimpleNamespace(room=0, blocks=[])
    pool = type(allocator.pool)
    refresh, reserve = pool.refresh_credit, pool.reserve_demand

    def refresh_credit(self, leave_bytes=0):
        calls.room += 1
        return refresh(self, leave_bytes)

    def reserve_demand(self, n):
        calls.blocks.append(n)
        return reserve(self, n)

    monkeypatch.setattr(pool, "refresh_credit", refresh_credit)
    monkeypatch.setattr(pool, "reserve_demand", reserve_demand)
    return calls


class TestRequest:
    def test_admitted_with_memory_for_all_of_it(self, allocator):
        adder = Adder(allocator)
        assert add(adder, 17) is AddReqResult.CONTINUE  # five blocks and one for SGLang to round with
        assert allocator.pool.backed_size() >= 6

    def test_whatever_is_admitted_can_be_allocated(self, allocator):
        adder = Adder(allocator)
        assert [add(adder, 7) for _ in range(4)][-1] is AddReqResult.OTHER
        assert adder.admitted == [7, 7, 7], "two blocks each and one to round with"
        assert prefill(allocator, adder.admitted) is not None

    def test_short_of_memory_it_waits_and_the_batch_is_not_full(self, allocator):
        adder = Adder(allocator)
        assert add(adder, 41) is AddReqResult.OTHER, "after NO_TOKEN SGLang would wait for a request to end"
        assert adder.admitted == []
        allocator.refused = False  # the next pass, and memory has come back
        allocator.pool.budget_pages = 4
        assert add(adder, 41) is AddReqResult.CONTINUE

    def test_short_of_tokens_sglang_decides(self, allocator):
        allocator.pool.budget_pages = 100
        adder = Adder(allocator)
        add(adder, (USABLE_BLOCKS + 5) * PAGE_SIZE)
        assert len(adder.admitted) == 1

    def test_cached_prefixes_can_be_evicted_for_it(self, allocator):
        held = allocator.alloc(8 * PAGE_SIZE)
        assert add(Adder(allocator), 4 * PAGE_SIZE) is AddReqResult.OTHER
        assert add(Adder(allocator, evictable=PAGE_SIZE), 4 * PAGE_SIZE) is AddReqResult.OTHER
        assert add(Adder(allocator, evictable=2 * PAGE_SIZE), 4 * PAGE_SIZE) is AddReqResult.CONTINUE
        allocator.free(held[: 2 * PAGE_SIZE])  # as SGLang evicts before it allocates
        assert prefill(allocator, [4 * PAGE_SIZE]) is not None

    def test_its_own_prefix_cannot(self, allocator):
        allocator.alloc(8 * PAGE_SIZE)
        own = 2 * PAGE_SIZE
        assert add(Adder(allocator, evictable=2 * PAGE_SIZE), own + 4 * PAGE_SIZE, own) is AddReqResult.OTHER
        assert (
            add(Adder(allocator, evictable=4 * PAGE_SIZE), own + 4 * PAGE_SIZE, own) is AddReqResult.CONTINUE
        )
        assert add(Adder(allocator), own + 2 * PAGE_SIZE, own) is AddReqResult.CONTINUE, "nor does it cost"

    def test_of_a_chunked_one_only_its_chunk_counts(self, allocator):
        adder = Adder(allocator, chunk=8 * PAGE_SIZE)
        assert add(adder, 1000) is AddReqResult.CONTINUE
        assert adder.admitted == [8 * PAGE_SIZE]

    def test_the_driver_refuses_once_a_pass(self, allocator, calls):
        for _ in range(4):
            assert add(Adder(allocator), 20 * PAGE_SIZE) is AddReqResult.OTHER
        assert len(calls.blocks) == 1


class TestChunk:
    def test_taken_whole_where_there_is_memory(self, allocator):
        adder = Adder(allocator, chunk=6 * PAGE_SIZE)
        left = request(100, prefix=40)
        assert adder.add_chunked_req(left) is left
        assert adder.admitted == [6 * PAGE_SIZE]
        assert adder.rem_chunk_tokens == 0

    def test_cut_to_what_there_is(self, allocator):
        adder = Adder(allocator, chunk=20 * PAGE_SIZE)
        left = request(100)
        assert adder.add_chunked_req(left) is left
        assert adder.admitted == [10 * PAGE_SIZE], "eleven blocks, one of them to round with"
        assert adder.rem_chunk_tokens == 10 * PAGE_SIZE, "as if there had been no cut"
        assert prefill(allocator, adder.admitted) is not None

    def test_the_last_one_too(self, allocator):
        adder = Adder(allocator, chunk=100)
        left = request(13 * PAGE_SIZE + 2, prefix=PAGE_SIZE)
        assert adder.add_chunked_req(left) is left, "it is not the last one any more"
        assert adder.admitted == [10 * PAGE_SIZE]

    def test_what_can_be_evicted_counts(self, allocator):
        allocator.alloc(8 * PAGE_SIZE)
        adder = Adder(allocator, chunk=20 * PAGE_SIZE, evictable=5 * PAGE_SIZE + 1)
        adder.add_chunked_req(request(100))
        assert adder.admitted == [7 * PAGE_SIZE], "whole pages"

    def test_what_the_batch_has_already_does_not(self, allocator):
        adder = Adder(allocator, chunk=20 * PAGE_SIZE)
        adder.cur_rem_token_offset = 3 * PAGE_SIZE  # running requests in a mixed batch
        adder.add_chunked_req(request(100))
        assert adder.admitted == [7 * PAGE_SIZE]

    def test_parked_where_nothing_can_be_had(self, allocator):
        allocator.alloc(10 * PAGE_SIZE)
        adder = Adder(allocator, chunk=8 * PAGE_SIZE)
        left = request(100, prefix=40)
        assert adder.add_chunked_req(left) is left
        assert adder.admitted == []
        assert adder.rem_chunk_tokens == 8 * PAGE_SIZE
        allocator.refused = False
        allocator.pool.budget_pages = 100
        assert add(adder, 1) is AddReqResult.OTHER, "it began first, and nobody overtakes it"

    def test_the_budget_is_whole_again_after_a_failure(self, allocator, monkeypatch):
        adder = Adder(allocator, chunk=20 * PAGE_SIZE)

        def fail(req):
            raise RuntimeError("of SGLang")

        monkeypatch.setattr(adder, "_take", fail)
        with pytest.raises(RuntimeError, match="of SGLang"):
            adder.add_chunked_req(request(100))
        assert adder.rem_chunk_tokens == 20 * PAGE_SIZE


class Batch:
    """Running requests. The decisions are SGLang's own."""

    new_tokens_required_next_decode = ScheduleBatch.new_tokens_required_next_decode
    _get_decode_retraction_order = staticmethod(ScheduleBatch._get_decode_retraction_order)
    check_decode_mem = admission.secured_decode(ScheduleBatch.check_decode_mem)
    retract_decode = admission.retracted_not_aborted(ScheduleBatch.retract_decode)
    spec_algorithm = SimpleNamespace(is_none=lambda: True)
    batch_is_full = False

    def __init__(self, allocator: Any, lengths: list[int]) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.evicted = []
        self.tree_cache = SimpleNamespace(
            token_to_kv_pool_allocator=allocator,
            is_chunk_cache=lambda: False,
            evict=lambda params: self.evicted.append(params.num_tokens),
        )
        self.reqs = []
        for number, length in enumerate(lengths):
            row = allocator.alloc(-(-length // allocator.page_size) * allocator.page_size)
            self.reqs.append(
                SimpleNamespace(
                    rid=f"r{number}",
                    row=row,
                    kv_committed_len=length,
                    output_ids=[0] * (9 - number),  # the last one is retracted first
                    origin_input_ids=[0],
                    sampling_params=SimpleNamespace(max_new_tokens=20),
                    to_finish=None,
                )
            )

    def release_req(self, idx, remaing_req_count, server_args):
        self.token_to_kv_pool_allocator.free(self.reqs[idx].row)

    def filter_batch(self, keep_indices):
        self.reqs = [self.reqs[i] for i in keep_indices]

    def retract(self):
        return self.retract_decode(SimpleNamespace(retraction_policy="length"))

    def decode(self) -> torch.Tensor | None:
        """Allocates as SGLang does for one more token of each."""
        lens = torch.tensor([req.kv_committed_len + 1 for req in self.reqs])
        last = torch.tensor([int(req.row[req.kv_committed_len - 1]) for req in self.reqs])
        return self.token_to_kv_pool_allocator.alloc_decode(lens, lens, last)


class TestDecode:
    def test_secures_exactly_what_is_needed(self, allocator, calls):
        batch = Batch(allocator, [8, 4, 7])  # two of them begin a block
        allocator.ask_device()
        calls.room, mapped = 0, settled_pages(allocator.pool)
        assert batch.check_decode_mem()
        assert allocator.pool.backed_size() >= 2
        assert settled_pages(allocator.pool) == mapped, "page 1 has two more"
        assert calls.room == 0
        assert batch.decode() is not None

    def test_of_the_selected_ones(self, allocator):
        batch = Batch(allocator, [5 * PAGE_SIZE, 5 * PAGE_SIZE])
        assert allocator.pool.backed_size() == 1
        assert batch.check_decode_mem([0])
        assert not batch.check_decode_mem([0, 1])

    def test_evicts_nothing_for_what_it_does_not_need(self, allocator, calls):
        """The allocation will count a block for each request: where the device has room for that, it is said."""
        batch = Batch(allocator, [3, 3, 2])
        assert allocator.available_size() < 3 * PAGE_SIZE
        assert batch.check_decode_mem()
        assert calls.room == 1
        assert allocator.available_size() >= 3 * PAGE_SIZE
        assert settled_pages(allocator.pool) == [0], "nothing is taken for it"
        assert batch.evicted == []

    def test_short_of_tokens_the_device_is_not_asked(self, allocator, calls):
        allocator.pool.budget_pages = 100
        batch = Batch(allocator, [USABLE_BLOCKS * PAGE_SIZE])
        assert not batch.check_decode_mem()
        assert calls.room == 0

    def test_short_of_memory_cached_prefixes_go_first(self, allocator):
        batch = Batch(allocator, [5 * PAGE_SIZE, 5 * PAGE_SIZE])
        cached = allocator.alloc(PAGE_SIZE)
        batch.tree_cache.evict = lambda params: (
            batch.evicted.append(params.num_tokens),
            allocator.free(cached),
        )
        assert not batch.check_decode_mem(), "one could be evicted and two are needed"
        assert batch.evicted == [2 * PAGE_SIZE]

    def test_a_refused_driver_is_not_asked_again_in_this_pass(self, allocator, calls):
        batch = Batch(allocator, [5 * PAGE_SIZE, 6 * PAGE_SIZE])
        assert not batch.check_decode_mem()
        assert calls.room == 1 and len(calls.blocks) == 1
        assert not batch.check_decode_mem([0])
        assert not batch.check_decode_mem()
        assert calls.room == 1 and len(calls.blocks) == 1


class TestRetract:
    def test_as_many_as_memory_is_missing_for(self, allocator):
        batch = Batch(allocator, [4 * PAGE_SIZE, 4 * PAGE_SIZE, 3 * PAGE_SIZE])
        assert not batch.check_decode_mem()
        retracted, _, aborted = batch.retract()
        assert [req.rid for req in retracted] == ["r2"]
        assert aborted == []
        assert batch.decode() is not None

    def test_the_last_one_waits_for_memory(self, allocator):
        batch = Batch(allocator, [11 * PAGE_SIZE])
        (req,) = batch.reqs
        assert not batch.check_decode_mem()
        retracted, _, aborted = batch.retract()
        assert retracted == [req] and aborted == []
        assert req.to_finish is None
        assert batch.reqs == []

    def test_all_of_them_wait_where_not_even_one_can_go_on(self, allocator):
        batch = Batch(allocator, [7 * PAGE_SIZE, 4 * PAGE_SIZE])
        requests = list(batch.reqs)
        assert not batch.check_decode_mem()
        batch.release_req = lambda idx, remaining, server_args: (
            None
        )  # what they have is in the prefix cache and locked
        retracted, _, aborted = batch.retract()
        assert retracted == requests[::-1] and aborted == []

    def test_the_last_one_is_aborted_where_tokens_are_missing(self, allocator):
        allocator.pool.budget_pages = 100
        batch = Batch(allocator, [USABLE_BLOCKS * PAGE_SIZE])
        (req,) = batch.reqs
        assert not batch.check_decode_mem()
        assert not allocator.refused
        retracted, _, aborted = batch.retract()
        assert retracted == [] and aborted == [req]
        assert req.to_finish is not None


class Scheduler:
    """One pass of SGLang's scheduler; `during` is what it does in it."""

    def __init__(self, allocator: Any) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.waiting_queue: list[Any] = []
        self.chunked_req = None
        self.tree_cache = cache(0)
        self.running_batch = SimpleNamespace(batch_is_full=False, is_empty=lambda: self.nothing_runs)
        self.nothing_runs = True
        self.during = lambda: None

    @admission.begin_pass
    def get_next_batch_to_run(self, running_batch, last_batch):
        return SimpleNamespace(batch_to_run=self.during(), running_batch=running_batch)

    def step(self):
        return self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=None)


class TestPass:
    @pytest.fixture
    def scheduler(self, allocator):
        return Scheduler(allocator)

    @pytest.fixture(autouse=True)
    def slept(self, monkeypatch):
        slept = []
        monkeypatch.setattr(admission.time, "sleep", slept.append)
        return slept

    def test_the_device_is_asked_once_and_only_where_requests_wait(self, scheduler, calls):
        scheduler.step()
        assert calls.room == 0
        scheduler.waiting_queue = [request(3)]
        scheduler.step()
        assert calls.room == 1
        scheduler.waiting_queue, scheduler.chunked_req = [], request(3)
        scheduler.step()
        assert calls.room == 2
        assert scheduler.token_to_kv_pool_allocator.available_size() == 11 * PAGE_SIZE

    def test_a_new_pass_asks_again(self, scheduler, allocator):
        allocator.refused = True
        scheduler.during = lambda: allocator.refused
        assert scheduler.step().batch_to_run is False

    def test_full_is_taken_back_while_memory_is_short(self, scheduler, allocator):
        scheduler.waiting_queue = [request(3)]
        scheduler.running_batch.batch_is_full = True
        scheduler.step()
        assert not scheduler.running_batch.batch_is_full

    def test_full_of_tokens_it_stays_full(self, scheduler, allocator, calls):
        allocator.pool.budget_pages = 100
        allocator.alloc(USABLE_BLOCKS * PAGE_SIZE)
        scheduler.waiting_queue = [request(3)]
        scheduler.running_batch.batch_is_full = True
        scheduler.step()
        assert scheduler.running_batch.batch_is_full
        assert calls.room == 0

    def test_a_starving_engine_does_not_spin(self, scheduler, allocator, slept):
        scheduler.step()
        assert slept == [], "nobody waits"
        scheduler.waiting_queue = [request(3)]
        scheduler.during = lambda: "a batch"
        scheduler.step()
        assert slept == [], "something was scheduled"
        scheduler.during = lambda: None
        scheduler.step()
        assert slept == [admission.STARVED_SLEEP_S]
        allocator.pool.budget_pages = 100
        scheduler.step()
        assert len(slept) == 1, "it waits for something else"

    @pytest.mark.parametrize("max_reserved_pages", [0, 1])
    def test_what_is_evicted_in_a_pass_is_not_lost_to_others(self, elastic, max_reserved_pages):
        """No batch is running. A request is admitted on what can be evicted; others wait for every page that leaves."""
        page_bytes = 2 * BLOCKS_PER_PAGE * 4096
        allocator = elastic(PAGE_SIZE, budget_pages=6, max_reserved_bytes=max_reserved_pages * page_bytes)
        scheduler = Scheduler(allocator)
        cached = allocator.alloc(23 * PAGE_SIZE)
        scheduler.waiting_queue = [request(15 * PAGE_SIZE)]

        def admit():
            adder = Adder(allocator, evictable=len(cached))
            assert add(adder, 15 * PAGE_SIZE) is AddReqResult.CONTINUE
            allocator.free(cached[-16 * PAGE_SIZE :])
            allocator.pool.budget_pages = 1
            return prefill(allocator, adder.admitted)

        scheduler.during = admit
        assert scheduler.step().batch_to_run is not None


class TestObserver:
    def observed(self, allocator: Any) -> SchedulerPoolStatsObserver:
        fields = dict.fromkeys(SchedulerPoolStatsObserver.__dataclass_fields__, None) | {
            "is_hybrid_swa": False,
            "is_hybrid_ssm": False,
            "enable_hisparse": False,
            "max_total_num_tokens": USABLE_BLOCKS * PAGE_SIZE,
            "tree_cache": cache(PAGE_SIZE),
            "token_to_kv_pool_allocator": allocator,
        }

        @admission.observer_counts_blocks
        def init_pool_stats_observer(self):
            self.pool_stats_observer = SchedulerPoolStatsObserver(**fields)

        scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator, tree_cache=cache(PAGE_SIZE))
        init_pool_stats_observer(scheduler)
        return scheduler.pool_stats_observer

    def test_usage_is_what_is_held_whatever_memory_there_is(self, allocator):
        allocator.alloc(3 * PAGE_SIZE)
        stats = self.observed(allocator).get_pool_stats()
        assert stats.full_available_size == (USABLE_BLOCKS - 3) * PAGE_SIZE > allocator.available_size()
        assert stats.full_num_used == 2 * PAGE_SIZE, "three less the one that can be evicted"
        assert self.observed(allocator).token_to_kv_pool_allocator.size == USABLE_BLOCKS * PAGE_SIZE

    def test_natively_it_is_sglang_s(self):
        native = native_allocator(PAGE_SIZE)
        assert self.observed(native).token_to_kv_pool_allocator is native


def test_native_engines_pass_through():
    native = native_allocator(PAGE_SIZE)
    adder = Adder(native, chunk=8)
    assert add(adder, 1000) is AddReqResult.CONTINUE
    adder.rem_chunk_tokens = 8
    left = request(1000)
    assert adder.add_chunked_req(left) is left
    assert adder.admitted == [8, 8]
    batch = Batch(native, [USABLE_BLOCKS * PAGE_SIZE])
    (req,) = batch.reqs
    assert not batch.check_decode_mem()
    assert batch.retract()[2] == [req] and req.to_finish is not None
    scheduler = Scheduler(native)
    scheduler.waiting_queue = [request(1)]
    scheduler.running_batch.batch_is_full = True
    plan = scheduler.step()
    assert plan.batch_to_run is None and plan.running_batch.batch_is_full

"""SGLang's two allocators over ids of our ledger, without an engine.

What must hold after every call: a block is held in the ledger exactly while somebody has its indices, its page
is backed, and SGLang's own view of what is free is exactly the rest.
"""

from __future__ import annotations

import contextlib
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import BLOCKS_PER_PAGE, USABLE_BLOCKS, elastic_allocator, native_allocator
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from kvcached.errors import BlockError, StateConsistencyError
from kvcached.integration.refusal import UnsupportedConfiguration
from kvcached.integration.sglang import allocator as module
from kvcached.integration.sglang.allocator import make_elastic
from tests.ranges import settled_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

every_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])
pages_of_tokens = pytest.mark.parametrize("page_size", [4, 16])

NOTHING = torch.empty(0, dtype=torch.int64)
"""The row of a request that has no tokens yet."""


def extend(allocator, rows: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor] | None:
    """The rows with so many more tokens each, as SGLang's scheduler allocates for a prefill."""
    total = sum(lengths)
    if allocator.page_size == 1:
        indices = allocator.alloc(total)
    else:
        have = torch.tensor([len(row) for row in rows])
        want = have + torch.tensor(lengths)
        last = torch.tensor([int(row[-1]) if len(row) else -1 for row in rows])
        indices = allocator.alloc_extend(have, have, want, want, last, total)
    if indices is None:
        return None
    return [torch.cat(pair) for pair in zip(rows, indices.split(list(lengths)), strict=True)]


def decode(allocator, rows: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The rows with one more token each."""
    if allocator.page_size == 1:
        return extend(allocator, rows, [1] * len(rows))
    want = torch.tensor([len(row) + 1 for row in rows])
    indices = allocator.alloc_decode(want, want, torch.tensor([int(row[-1]) for row in rows]))
    if indices is None:
        return None
    return [torch.cat(pair) for pair in zip(rows, indices.split(1), strict=True)]


def blocks_of(allocator, row: torch.Tensor) -> list[int]:
    """SGLang's pages of a row, in its order; each is a block of ours."""
    return (row[:: allocator.page_size] // allocator.page_size).tolist()


def check(allocator, rows: Sequence[torch.Tensor]) -> None:
    """These rows are all that is held."""
    page_size, pool = allocator.page_size, allocator.pool
    held = [block for row in rows for block in blocks_of(allocator, row)]
    for row in rows:
        assert row.dtype == torch.int64
        within = torch.arange(len(row)) % page_size
        whole = torch.tensor(blocks_of(allocator, row)).repeat_interleave(page_size)[: len(row)]
        assert torch.equal(row, whole * page_size + within), "a page's tokens lie in order"
        assert not len(row) or int(row.max()) < pool.id_space * page_size
    assert len(set(held)) == len(held), "a block belongs to one"
    assert 0 not in held
    assert set(pool.pages_of(held)) <= set(settled_pages(pool))
    every = {pool.geometry.block_id(index) for index in range(pool.num_blocks)}
    free = allocator.free_pages.tolist()
    assert sorted(free) == sorted(every - set(held) - {0})
    assert allocator.logical_size() == len(free) * page_size
    assert 0 <= allocator.available_size() <= allocator.logical_size()


def sizes(allocator) -> tuple[Any, ...]:
    return (
        allocator.available_size(),
        allocator.logical_size(),
        allocator.pool.stats(),
        allocator.free_pages.tolist(),
    )


def test_make_elastic_keeps_the_concrete_classes(elastic):
    for page_size, native in ((1, TokenToKVPoolAllocator), (16, PagedTokenToKVPoolAllocator)):
        kv_pool = object()
        allocator = elastic(page_size, kv_pool=kv_pool)
        assert isinstance(allocator, native)
        assert allocator.size == USABLE_BLOCKS * page_size
        assert allocator.get_kvcache() is kv_pool
        check(allocator, [])


def test_other_allocators_are_refused(elastic):
    class Another(TokenToKVPoolAllocator):
        pass

    memory = elastic(1).memory
    with pytest.raises(UnsupportedConfiguration, match="allocator Another"):
        make_elastic(Another(39, torch.float32, "cpu", None, False), memory)
    disaggregated = TokenToKVPoolAllocator(39, torch.float32, "cpu", None, need_sort=True)
    with pytest.raises(UnsupportedConfiguration, match="disaggregated"):
        make_elastic(disaggregated, memory)
    with pytest.raises(UnsupportedConfiguration, match="POST_CAPTURE_KV_SIZING"):
        elastic(4).resize(SimpleNamespace(max_total_num_tokens=8))


@every_page_size
@pytest.mark.parametrize("order", ["lowest", "highest"])
def test_alloc_gives_whole_pages(elastic, page_size, order):
    allocator = elastic(page_size, highest_pages_first=order == "highest")
    rows = [allocator.alloc(count * page_size) for count in (1, 7, 12)]
    check(allocator, rows)
    assert [len(row) for row in rows] == [page_size, 7 * page_size, 12 * page_size]
    in_last_page = allocator.pool.geometry.block_id(USABLE_BLOCKS) // allocator.pool.geometry.ids_per_page
    reached = allocator.pool.pages_of([block for row in rows for block in blocks_of(allocator, row)])
    assert (in_last_page in reached) is (order == "highest")


@pages_of_tokens
def test_rows_grow_as_natively(elastic, page_size):
    """The same calls on a native allocator: the same shape, another block for each of its pages."""
    allocator, native = elastic(page_size), native_allocator(page_size)
    ours, theirs = [NOTHING] * 3, [NOTHING] * 3
    for lengths in ((5, 1, page_size), (page_size, 2, 1), (1, 3 * page_size + 1, 2)):
        ours, theirs = extend(allocator, ours, lengths), extend(native, theirs, lengths)
        check(allocator, ours)
        for _ in range(3):
            ours, theirs = decode(allocator, ours), decode(native, theirs)
            check(allocator, ours)
    assert [len(row) for row in ours] == [len(row) for row in theirs]
    assert allocator.logical_size() == native.available_size()
    pairs = {
        pair for a, b in zip(ours, theirs, strict=True)
        for pair in zip(blocks_of(allocator, a), blocks_of(native, b), strict=True)
    }  # fmt: skip
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


@every_page_size
def test_all_tokens_can_be_had_and_no_more(elastic, page_size):
    allocator = elastic(page_size)
    row = allocator.alloc(USABLE_BLOCKS * page_size)
    check(allocator, [row])
    assert allocator.available_size() == allocator.logical_size() == 0
    before = sizes(allocator)
    assert allocator.alloc(page_size) is None
    assert extend(allocator, [NOTHING], [1]) is None
    assert decode(allocator, [row]) is None
    assert sizes(allocator) == before
    allocator.free(row)
    check(allocator, [])


@every_page_size
def test_short_of_memory_nothing_changes(elastic, page_size):
    allocator = elastic(page_size, budget_pages=3)
    (row,) = extend(allocator, [NOTHING], [9 * page_size])
    before = sizes(allocator)
    assert extend(allocator, [NOTHING, NOTHING], [page_size, 2 * page_size]) is None
    assert sizes(allocator) == before
    (row,) = extend(allocator, [row], [2 * page_size])
    assert decode(allocator, [row]) is None, "eleven blocks of three pages are held"
    check(allocator, [row])
    assert allocator.is_short


class TestPromise:
    @every_page_size
    @pytest.mark.parametrize("budget_pages", [1, 2, 5, 10, None])
    @pytest.mark.parametrize("held", [0, 3, 6])
    def test_what_is_available_can_be_had(self, elastic, page_size, budget_pages, held):
        allocator = elastic(page_size, budget_pages=max(budget_pages, 2) if budget_pages else None)
        rows = [allocator.alloc(held * page_size)]
        if budget_pages is not None:
            allocator.pool.budget_pages = budget_pages
        allocator.ask_device()
        promised = allocator.available_size()
        assert promised > 0 or budget_pages in (1, 2)
        rows.append(allocator.alloc(promised))
        check(allocator, rows)
        assert allocator.available_size() == 0

    def test_nothing_is_promised_that_was_not_seen(self, elastic):
        allocator = elastic(1)
        assert allocator.available_size() == BLOCKS_PER_PAGE - 1, "the rest of page 0"
        assert allocator.is_short
        allocator.ask_device()
        assert allocator.available_size() == allocator.logical_size() == USABLE_BLOCKS
        assert not allocator.is_short

    def test_a_refusal_takes_the_promise_back(self, elastic):
        allocator = elastic(1)
        allocator.ask_device()
        allocator.pool.budget_pages = 2  # others took the rest since
        assert allocator.alloc(20) is None
        assert allocator.refused
        assert allocator.available_size() == BLOCKS_PER_PAGE - 1

    def test_more_than_there_are_is_no_refusal(self, elastic):
        allocator = elastic(4)
        assert allocator.alloc((USABLE_BLOCKS + 1) * 4) is None
        assert not allocator.refused, "no memory would help"

    @every_page_size
    def test_logical_size_is_what_nobody_holds(self, elastic, page_size):
        allocator = elastic(page_size, budget_pages=4)
        assert allocator.logical_size() == USABLE_BLOCKS * page_size
        row = allocator.alloc(9 * page_size)
        for budget in (1, 4, 100):
            allocator.pool.budget_pages = budget
            allocator.ask_device()
            assert allocator.logical_size() == (USABLE_BLOCKS - 9) * page_size
        allocator.free(row)
        assert allocator.logical_size() == USABLE_BLOCKS * page_size


class TestSecure:
    def test_backs_what_was_named_and_no_more(self, elastic):
        allocator = elastic(4)
        assert allocator.secure(4 * 4 * BLOCKS_PER_PAGE) == 0
        assert len(settled_pages(allocator.pool)) == 5, "page 0 has three free blocks"
        mapped = settled_pages(allocator.pool)
        assert allocator.alloc(4 * 4 * BLOCKS_PER_PAGE) is not None
        assert settled_pages(allocator.pool) == mapped

    def test_what_was_secured_stays_although_idle_memory_leaves(self, elastic):
        """What has just retired leaves in the background, and nobody can have it back."""
        allocator = elastic(1)
        for _ in range(50):
            allocator.pool.budget_pages, allocator.refused = 1000, False
            epoch = allocator.memory.begin_epoch()
            allocator.free(allocator.alloc(USABLE_BLOCKS))
            allocator.memory.release_through(epoch)
            allocator.refused, allocator.pool.budget_pages = True, 0
            told = USABLE_BLOCKS - allocator.secure(USABLE_BLOCKS)
            row = allocator.alloc(told)
            assert len(row) == told
            allocator.free(row)

    def test_says_how_many_tokens_lack_memory(self, elastic):
        allocator = elastic(4, budget_pages=2)
        assert allocator.secure(7 * 4) == 0
        assert not allocator.refused
        assert allocator.secure(8 * 4) == 4
        assert allocator.secure(8 * 4 - 3) == 4, "whole pages"
        assert allocator.refused

    def test_tokens_that_do_not_exist_lack_no_memory(self, elastic):
        allocator = elastic(4)
        assert allocator.secure(1000 * 4) == 0
        assert not allocator.refused

    def test_the_driver_is_asked_once_after_a_refusal(self, elastic, monkeypatch):
        allocator = elastic(4, budget_pages=2)
        asked = []
        reserve = type(allocator.pool).reserve_demand
        monkeypatch.setattr(
            type(allocator.pool), "reserve_demand", lambda self, n: (asked.append(n), reserve(self, n))[1]
        )
        assert [allocator.secure(10 * 4) for _ in range(3)] == [3 * 4] * 3
        assert asked == [10]
        assert allocator.secure(7 * 4) == 0, "what is on hand needs no driver"
        allocator.refused = False  # the next pass
        allocator.pool.budget_pages = 3
        assert allocator.secure(10 * 4) == 0


class TestFreeing:
    @every_page_size
    def test_order_and_part_of_a_page_do_not_matter(self, elastic, page_size):
        allocator = elastic(page_size)
        row = allocator.alloc(6 * page_size)
        allocator.free(NOTHING)
        check(allocator, [row])
        allocator.free(row.flip(0)[: 4 * page_size])
        check(allocator, [row[: 2 * page_size]])
        allocator.free(row[:page_size].to(torch.int32))  # as the table of requests has them
        check(allocator, [row[page_size : 2 * page_size]])
        allocator.free(
            row[2 * page_size - 1 : 2 * page_size]
        )  # the last token alone, a page of one of which is a page
        check(allocator, [])

    @every_page_size
    @pytest.mark.parametrize("grouped", [False, True])
    def test_segments_of_a_row(self, elastic, page_size, grouped):
        allocator = elastic(page_size)
        (row,) = extend(allocator, [NOTHING], [5 * page_size + 1])
        (other,) = extend(allocator, [NOTHING], [3 * page_size])
        if grouped:
            allocator.free_group_begin()
        allocator.free_segment(other[page_size:], start_pos=page_size)
        # From the middle of the second page, with a cut in the middle of the fourth.
        cuts = [(page_size, 3 * page_size + page_size // 2), (3 * page_size + page_size // 2, len(row))]
        allocator.free_segments([(row[start:end], start) for start, end in cuts])
        if grouped:
            check(allocator, [row, other])
            allocator.free_group_end()
        check(allocator, [row[:page_size], other[:page_size]])
        allocator.free_segments([(row[:page_size], 0), (NOTHING, page_size)])
        allocator.free(other[:page_size])
        check(allocator, [])

    @every_page_size
    def test_a_group_holds_indices_and_not_views_of_them(self, elastic, page_size):
        """Between the calls and the end of a group SGLang may rewrite the table that its indices are views of."""

        def freed_by(allocator):
            first, second, third = (allocator.alloc(2 * page_size) for _ in range(3))
            table = torch.cat((first, second, third)).to(torch.int64)
            allocator.free_group_begin()
            allocator.free(table[: 2 * page_size])
            allocator.free_segment(table[2 * page_size : 4 * page_size], start_pos=0)
            table.zero_()
            allocator.free_group_end()
            return third

        allocator = elastic(page_size)
        check(allocator, [freed_by(allocator)])
        # Natively page 0, which belongs to nobody, is free from then on, and four pages are lost.
        native = native_allocator(page_size)
        with contextlib.suppress(
            AssertionError
        ):  # in its debug mode the paged one notices: page 0 is free twice
            freed_by(native)
        assert 0 in native.free_pages.tolist()

    @every_page_size
    def test_memory_leaves_when_the_batches_that_used_it_have_ended(self, elastic, page_size):
        allocator = elastic(page_size)
        epoch = allocator.pool.begin_epoch()
        row = allocator.alloc(20 * page_size)
        mapped = settled_pages(allocator.pool)
        allocator.free(row)
        assert settled_pages(allocator.pool) == mapped
        allocator.pool.release_through(epoch)
        assert settled_pages(allocator.pool) == [0]
        check(allocator, [])


class TestErrors:
    """A contract violation is typed and changes nothing."""

    @staticmethod
    def wrong(allocator, row: torch.Tensor) -> dict[str, torch.Tensor]:
        page_size, geometry = allocator.page_size, allocator.pool.geometry
        return {
            "page 0": torch.zeros(1, dtype=torch.int64),
            "a hole": torch.tensor([BLOCKS_PER_PAGE * page_size]),
            "past the end": torch.tensor([allocator.pool.id_space * page_size]),
            "never allocated": torch.tensor([geometry.block_id(USABLE_BLOCKS) * page_size]),
            "one of them": torch.cat((row[:page_size], torch.tensor([BLOCKS_PER_PAGE * page_size]))),
        }

    @every_page_size
    @pytest.mark.parametrize("what", ["page 0", "a hole", "past the end", "never allocated", "one of them"])
    @pytest.mark.parametrize("grouped", [False, True])
    def test_foreign_ids(self, elastic, page_size, what, grouped):
        allocator = elastic(page_size)
        row = allocator.alloc(5 * page_size)
        before = sizes(allocator)
        if grouped:
            allocator.free_group_begin()
            allocator.free(self.wrong(allocator, row)[what])
        with pytest.raises(BlockError):
            if grouped:
                allocator.free_group_end()
            else:
                allocator.free(self.wrong(allocator, row)[what])
        assert sizes(allocator) == before
        allocator.free(row)
        check(allocator, [])

    @every_page_size
    def test_double_free(self, elastic, page_size):
        allocator = elastic(page_size)
        row, other = allocator.alloc(5 * page_size), allocator.alloc(2 * page_size)
        allocator.free(row)
        for again in (row, row[:page_size], torch.cat((other, row))):
            with pytest.raises(BlockError):
                allocator.free(again)
            check(allocator, [other])
        if page_size == 1:  # of more than one token SGLang itself makes a set
            with pytest.raises(BlockError):
                allocator.free(torch.cat((other, other)))
        check(allocator, [other])

    @every_page_size
    def test_double_free_in_a_group(self, elastic, page_size):
        allocator = elastic(page_size)
        row = allocator.alloc(4 * page_size)
        allocator.free_group_begin()
        allocator.free_segment(row[: 3 * page_size], start_pos=0)
        allocator.free_segment(row[2 * page_size :], start_pos=2 * page_size)
        with pytest.raises(BlockError):
            allocator.free_group_end()
        check(allocator, [row])
        allocator.free(row)
        check(allocator, [])

    @pytest.mark.parametrize(
        ("page_size", "method"), [(1, "alloc"), (4, "alloc"), (4, "alloc_extend"), (4, "alloc_decode")]
    )
    @pytest.mark.parametrize("outcome", ["raises", "None"])
    def test_a_native_method_that_fails_loses_nothing(self, elastic, monkeypatch, page_size, method, outcome):
        allocator = elastic(page_size)
        rows = extend(allocator, [NOTHING], [2 * page_size])

        def broken(*args, **kwargs):
            if outcome == "raises":
                raise RuntimeError("no kernel")

        native = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        calls = {
            "alloc": lambda: allocator.alloc(8),
            "alloc_extend": lambda: extend(allocator, rows, [9]),
            "alloc_decode": lambda: decode(allocator, rows),
        }
        with monkeypatch.context() as patch:
            patch.setattr(native, method, broken)
            if outcome == "raises":
                with pytest.raises(RuntimeError, match="no kernel"):
                    calls[method]()
            else:
                assert calls[method]() is None
        check(allocator, rows)
        rows.append(allocator.alloc(8))
        check(allocator, rows)

    def test_a_native_method_that_takes_fewer_pages_than_it_should(self, elastic, monkeypatch):
        allocator = elastic(4)
        alloc = PagedTokenToKVPoolAllocator.alloc
        monkeypatch.setattr(PagedTokenToKVPoolAllocator, "alloc", lambda self, size: alloc(self, size - 4))
        with pytest.raises(StateConsistencyError, match="took 2 pages of the 3"):
            allocator.alloc(12)


class TestClear:
    @every_page_size
    @pytest.mark.parametrize("state", ["new", "some", "all", "open group", "short", "in a batch"])
    def test_everything_is_free_and_usable(self, elastic, page_size, state):
        allocator = elastic(page_size)
        if state == "short":
            allocator.pool.budget_pages = 4
            assert allocator.alloc(20 * page_size) is None
        if state == "in a batch":
            allocator.memory.begin_epoch()
        if state != "new":
            row = allocator.alloc((USABLE_BLOCKS if state == "all" else 10) * page_size)
            if state == "open group":
                allocator.free_group_begin()
                allocator.free(row[:page_size])
                allocator.free_segment(row[2 * page_size :], start_pos=2 * page_size)
            if state == "in a batch":
                allocator.free(row)
        allocator.clear()
        assert settled_pages(allocator.pool) == [0]
        check(allocator, [])
        allocator.pool.budget_pages = 100
        (row,) = extend(allocator, [NOTHING], [USABLE_BLOCKS * page_size])
        check(allocator, [row])
        allocator.free(row)  # at once: no group is open
        check(allocator, [])

    def test_the_reserve_stays(self, elastic):
        page_bytes = 2 * BLOCKS_PER_PAGE * 4096
        allocator = elastic(4, max_reserved_bytes=2 * page_bytes)
        allocator.alloc(USABLE_BLOCKS * 4)
        allocator.clear()
        assert len(settled_pages(allocator.pool)) == 3
        check(allocator, [])


class Device:
    """A GPU's queue. Copies to the host are made when it gets to them, or when somebody waits for their event."""

    def __init__(self) -> None:
        self.queued: deque[Callable[[], None]] = deque()
        self.waits = 0

    def run(self, steps: int | None = None) -> None:
        """Do so many of the queued things, or all."""
        for _ in range(len(self.queued) if steps is None else steps):
            self.queued.popleft()()

    def as_torch(self) -> Any:
        """torch, but this device's where memory is pinned and events are made."""
        device = self

        class Pinned(torch.Tensor):
            def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
                value = source.clone()  # as it is when the device gets here, before what is queued later
                device.queued.append(lambda: torch.Tensor.copy_(self, value))

        class Event:
            def __init__(self) -> None:
                self.reached = False

            def record(self) -> None:
                device.queued.append(lambda: setattr(self, "reached", True))

            def query(self) -> bool:
                return self.reached

            def synchronize(self) -> None:
                device.waits += not self.reached
                while not self.reached:
                    device.run(1)

        class Torch:
            cuda = SimpleNamespace(Event=Event)

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

            def device(self, name: str) -> Any:
                return SimpleNamespace(type="cuda")

            def empty(self, shape: int | torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
                assert pin_memory
                made = torch.full((shape,) if isinstance(shape, int) else shape, -1, dtype=dtype)
                return made.as_subclass(Pinned)

        return Torch()


class TestFreedOnADevice:
    """There freed ids arrive by a copy that nobody waits for."""

    @pytest.fixture
    def device(self, monkeypatch):
        device = Device()
        monkeypatch.setattr(module, "torch", device.as_torch())
        monkeypatch.setenv(
            "SGLANG_DEBUG_MEMORY_POOL", "0"
        )  # it looks at what is free after each call, and so waits
        return device

    @every_page_size
    def test_the_count_is_known_at_once_and_the_ids_later(self, elastic, device, page_size):
        allocator = elastic(page_size)
        row = allocator.alloc(9 * page_size)
        allocator.free(row[: 4 * page_size])
        assert allocator.pool.held_size() == 10
        assert allocator.logical_size() == (USABLE_BLOCKS - 5) * page_size
        assert allocator.available_size() == (2 + 4) * page_size, "two blocks on hand and four on their way"
        device.run()
        allocator.collect()
        assert allocator.pool.held_size() == 6
        assert allocator.logical_size() == (USABLE_BLOCKS - 5) * page_size
        assert device.waits == 0
        check(allocator, [row[4 * page_size :]])

    @every_page_size
    def test_the_tensor_may_be_rewritten_at_once(self, elastic, device, page_size):
        allocator = elastic(page_size)
        row = allocator.alloc(4 * page_size)
        table = row.clone()
        allocator.free(table[: 2 * page_size])
        table.zero_()
        check(allocator, [row[2 * page_size :]])

    def test_ids_come_in_the_order_in_which_they_were_freed(self, elastic, device):
        allocator = elastic(1)
        row = allocator.alloc(6)
        allocator.free(row[:2])
        allocator.free(row[2:4])
        device.run(2)  # one copy and its event
        allocator.collect()
        assert allocator.pool.held_size() == 1 + 4
        assert allocator.logical_size() == USABLE_BLOCKS - 2
        assert device.waits == 0

    @every_page_size
    def test_only_an_allocation_that_needs_them_waits(self, elastic, device, page_size):
        allocator = elastic(page_size, budget_pages=3)
        row = allocator.alloc(8 * page_size)
        allocator.free(row[: 4 * page_size])
        rows = [row[4 * page_size :], allocator.alloc(3 * page_size)]
        assert device.waits == 0
        allocator.ask_device()
        assert allocator.available_size() == 4 * page_size
        rows.append(allocator.alloc(allocator.available_size()))
        assert device.waits == 1
        assert not allocator.refused
        check(allocator, rows)

    @pytest.mark.parametrize("by", ["alloc", "secure"])
    def test_what_has_arrived_is_used_before_more_memory_is_taken(self, elastic, device, by):
        allocator = elastic(1)
        row = allocator.alloc(11)
        allocator.free(row[1::2])
        device.run()
        mapped = settled_pages(allocator.pool)
        getattr(allocator, by)(5)
        assert settled_pages(allocator.pool) == mapped

    def test_secure_waits_where_nothing_else_is_left(self, elastic, device):
        allocator = elastic(4, budget_pages=3)
        row = allocator.alloc(8 * 4)
        allocator.free(row[: 4 * 4])
        assert allocator.secure(3 * 4) == 0
        assert device.waits == 0
        assert allocator.secure(7 * 4) == 0
        assert device.waits == 1
        assert not allocator.refused
        assert allocator.secure(8 * 4) == 4

    def test_sglang_s_checks_see_all_of_them(self, elastic, device):
        allocator = elastic(1)
        row = allocator.alloc(5)
        allocator.free(row)
        assert len(allocator.free_pages) == USABLE_BLOCKS

    @every_page_size
    def test_settle_brings_all_and_the_memory_leaves(self, elastic, device, page_size):
        allocator = elastic(page_size)
        allocator.memory.begin_epoch()
        row = allocator.alloc(USABLE_BLOCKS * page_size)
        allocator.free(row[: 20 * page_size])
        allocator.free(row[20 * page_size :])
        allocator.settle()
        assert not device.queued
        assert settled_pages(allocator.pool) == [0]
        check(allocator, [])

    @every_page_size
    def test_clear_drops_what_was_on_its_way(self, elastic, device, page_size):
        allocator = elastic(page_size)
        row = allocator.alloc(10 * page_size)
        allocator.free(row[: 5 * page_size])
        allocator.clear()
        check(allocator, [])
        row = allocator.alloc(10 * page_size)  # the same ids as before
        device.run()
        allocator.collect()
        check(allocator, [row])

    @every_page_size
    def test_a_double_free_is_found_when_the_ids_arrive(self, elastic, device, page_size):
        allocator = elastic(page_size)
        row, other = allocator.alloc(3 * page_size), allocator.alloc(2 * page_size)
        allocator.free(row)
        allocator.free(torch.cat((other, row)))
        device.run()
        with pytest.raises(BlockError):
            allocator.collect()
        check(allocator, [other])


class AnyOrderOfCalls(RuleBasedStateMachine):
    """As SGLang's scheduler calls, in any order; memory comes and goes meanwhile. The reference is a list of rows."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []

    @initialize(highest=st.booleans(), reserve_pages=st.integers(0, 2))
    def start(self, highest, reserve_pages):
        self.allocator = elastic_allocator(
            self.page_size,
            highest_pages_first=highest,
            max_reserved_bytes=reserve_pages * 2 * BLOCKS_PER_PAGE * 4096,
        )

    def teardown(self):
        if hasattr(self, "allocator"):
            self.allocator.memory.close()

    def expect(self, needed_blocks: int, call: Callable[[], Any]) -> Any:
        """What the call gives, which is something exactly where there are so many blocks and memory for them."""
        before, at_most = sizes(self.allocator), self.allocator.pool.at_most()
        got = call()
        assert (got is not None) is (needed_blocks <= at_most)
        if got is None:
            assert sizes(self.allocator)[1:] == before[1:], "only the promise may be taken back"
        return got

    @rule(lengths=st.lists(st.integers(1, 21), min_size=1, max_size=3))
    def prefill(self, lengths):
        needed = sum(-(-length // self.page_size) for length in lengths)
        self.rows += (
            self.expect(needed, lambda: extend(self.allocator, [NOTHING] * len(lengths), lengths)) or []
        )

    @precondition(lambda self: self.rows)
    @rule(length=st.integers(1, 21), data=st.data())
    def next_chunk(self, length, data):
        at = data.draw(st.integers(0, len(self.rows) - 1))
        row = self.rows[at]
        needed = -(-(len(row) + length) // self.page_size) - -(-len(row) // self.page_size)
        (self.rows[at],) = self.expect(needed, lambda: extend(self.allocator, [row], [length])) or [row]

    @precondition(lambda self: self.rows)
    @rule()
    def decode(self):
        needed = sum(len(row) % self.page_size == 0 for row in self.rows)
        self.rows = self.expect(needed, lambda: decode(self.allocator, self.rows)) or self.rows

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), how=st.sampled_from(["free", "segment", "two segments"]), grouped=st.booleans())
    def finish(self, data, how, grouped):
        numbers = data.draw(st.sets(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        if grouped:
            self.allocator.free_group_begin()
        for number in numbers:
            row = self.rows[number].clone()
            if how == "free":
                self.allocator.free(row)
            elif how == "segment":
                self.allocator.free_segment(row, start_pos=0)
            else:
                cut = data.draw(st.integers(0, len(row)))
                self.allocator.free_segments([(row[:cut], 0), (row[cut:], cut)])
            row.zero_()
        if grouped:
            self.allocator.free_group_end()
        self.rows = [row for number, row in enumerate(self.rows) if number not in numbers]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def evict_the_end(self, data):
        at = data.draw(st.integers(0, len(self.rows) - 1))
        row = self.rows[at]
        keep = data.draw(st.integers(0, len(row) // self.page_size)) * self.page_size
        self.allocator.free(row[keep:])
        self.rows[at] = row[:keep]
        self.rows = [row for row in self.rows if len(row)]

    @rule(pages=st.integers(0, 12))
    def others_take_or_give(self, pages):
        self.allocator.pool.budget_pages = pages

    @rule()
    def look_at_the_device(self):
        self.allocator.ask_device()

    @rule(tokens=st.integers(0, 200))
    def secure(self, tokens):
        self.allocator.refused = False
        short = self.allocator.secure(tokens)
        assert short % self.page_size == 0
        on_hand = self.allocator.pool.backed_size() * self.page_size
        assert on_hand >= min(tokens, self.allocator.logical_size()) - short

    @rule()
    def a_batch(self):
        memory = self.allocator.memory
        memory.release_through(memory.begin_epoch())

    @rule()
    def settle(self):
        self.allocator.settle()

    @rule()
    def clear(self):
        self.allocator.clear()
        self.rows = []

    @precondition(lambda self: self.rows)
    @rule()
    def foreign_ids(self):
        with pytest.raises(BlockError):
            self.allocator.free(torch.cat((self.rows[0], torch.tensor([BLOCKS_PER_PAGE * self.page_size]))))

    @invariant()
    def holds(self):
        if hasattr(self, "allocator"):
            check(self.allocator, self.rows)


@pytest.mark.parametrize("page_size", [1, 4])
def test_any_order_of_calls(page_size):
    machine = type("AnyOrderOfCalls", (AnyOrderOfCalls,), {"page_size": page_size})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )

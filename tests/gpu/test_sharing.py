"""Processes that share a real GPU: budgets, neighbours, strangers, limits from outside. Run by hand: `pytest tests/gpu` on a GPU machine.

Blocks of 4 MiB, four to a page of 16 MiB; memory is what the device says is free, not what we say.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from kvcached import control  # noqa: E402
from kvcached.instance import hardware  # noqa: E402
from tests.holders import Holder, compete, eventually, granted, shown  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB, GIB = 1 << 20, 1 << 30
BLOCK, PAGE = 4 * MIB, 16 * MIB
BLOCKS_A_GIB = GIB // BLOCK
SECONDS = float(os.environ.get("TEST_SHARING_S", "60"))
SLACK = 512 * MIB
"""What contexts and other users of the device may take or give back meanwhile."""


def free() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def holder() -> Iterator[Callable[..., Holder]]:
    """Starts processes with 32 GiB of addresses each; they are killed after the test."""
    started: list[Holder] = []

    def start(name: str, **settings: str) -> Holder:
        made = Holder(
            f"gpu-{name}-{os.getpid()}",
            device="cuda:0",
            num_blocks=32 * BLOCKS_A_GIB,
            block_bytes=BLOCK,
            KVCACHED_PAGE_MB="16",
            **settings,
        )
        started.append(made)
        assert made.hear() == "ready"
        return made

    yield start
    for each in started:
        each.end()


def part_of(one: Holder) -> int:
    return granted(one, hardware("cuda:0").identity)


RESERVE = {"KVCACHED_MIN_RESERVED_MB": str(8 << 10), "KVCACHED_MAX_RESERVED_MB": str(8 << 10)}


def test_a_budget_holds_on_the_device_and_idle_memory_goes_to_who_waits(holder) -> None:
    one = holder("one", KVCACHED_DEVICE_BUDGET="10G", **RESERVE)
    two = holder("two", KVCACHED_DEVICE_BUDGET="10G")
    assert part_of(one) == 8 * GIB
    before = free()
    began = time.monotonic()
    assert eventually(lambda: two.ask(f"alloc {6 * BLOCKS_A_GIB}") is True)
    print(f"6 GiB, 4 of them a neighbour's: {time.monotonic() - began:.3f} s")
    assert part_of(one) + part_of(two) <= 10 * GIB and part_of(two) == 6 * GIB
    assert abs((before - free()) - 2 * GIB) < SLACK, "what one gained beyond what the other lost"
    assert two.ask(f"alloc {5 * BLOCKS_A_GIB}") is False


def test_what_a_stranger_has_is_a_shortage_for_which_neighbours_give(holder) -> None:
    one = holder("one", **RESERVE)
    two = holder("two")
    stranger = torch.empty(free() - 2 * GIB, dtype=torch.int8, device="cuda")
    try:
        assert eventually(lambda: two.ask(f"alloc {6 * BLOCKS_A_GIB}") is True), (
            "the budget has room all along"
        )
        assert part_of(one) <= 8 * GIB - 4 * GIB + PAGE and part_of(two) == 6 * GIB
        assert two.ask(f"alloc {12 * BLOCKS_A_GIB}") is False
        assert two.ask("free 1") is True, "it lives"
    finally:
        del stranger
        torch.cuda.empty_cache()


def test_a_limit_from_outside_frees_memory_of_the_device(holder) -> None:
    one = holder("one")
    assert one.ask(f"alloc {8 * BLOCKS_A_GIB}") is True
    before = free()
    assert control.set_limit(one.name, 4 * GIB).state == "deferred"
    assert one.ask(f"free {4 * BLOCKS_A_GIB}") is True
    assert eventually(lambda: shown(one).state == "applied")
    assert abs((free() - before) - 4 * GIB) < SLACK
    assert one.ask("alloc 1") is False
    assert control.set_limit(one.name, None).state == "applied"
    assert one.ask(f"alloc {4 * BLOCKS_A_GIB}") is True


def test_a_killed_process_frees_its_part_within_a_second(holder) -> None:
    one = holder("one", KVCACHED_DEVICE_BUDGET="12G")
    two = holder("two", KVCACHED_DEVICE_BUDGET="12G")
    assert one.ask(f"alloc {10 * BLOCKS_A_GIB}") is True
    assert two.ask(f"alloc {6 * BLOCKS_A_GIB}") is False
    one.end()
    killed = time.monotonic()
    assert eventually(lambda: two.ask(f"alloc {6 * BLOCKS_A_GIB}") is True)
    taken = time.monotonic() - killed
    print(f"the part of a killed process: {taken:.3f} s")
    assert taken < 1


def test_four_for_a_minute_are_served_fairly_and_none_below_its_minimum(holder) -> None:
    """A budget of 10 GiB, of which the first has 2 guaranteed; each wants 1 to 6 at a time."""
    four = [holder("m0", KVCACHED_DEVICE_BUDGET="10G", KVCACHED_MIN="2G")]
    four += [holder(f"m{number}", KVCACHED_DEVICE_BUDGET="10G") for number in (1, 2, 3)]
    before, used = free(), [0]
    guaranteed = [2 * BLOCKS_A_GIB, 0, 0, 0]
    # What the parts add up to is of no one moment; what the device has is.
    tallies = compete(four, guaranteed, BLOCKS_A_GIB, SECONDS, lambda: used.append(before - free()))
    for one, tally in zip(four, tallies, strict=True):
        print(f"{one.name}: {tally}")
    print(f"most in use {max(used) / GIB:.2f} GiB")
    assert 6 * GIB < max(used) <= 10 * GIB + SLACK
    served = [tally.blocks for tally in tallies]
    assert min(served) > 0.5 * max(served), "over time each has as much as the others"
    assert max(tallies[0].waits_within_s) < 1.0, "what is guaranteed is there"
    assert max(max(tally.waits_s) for tally in tallies) < 5.0, "nobody is forgotten"

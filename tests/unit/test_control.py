"""`kvcached.control`: processes that share a device, and what is asked of them from outside. Blocks of 512 KiB, 4 to a page, 64 each."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvcached import _core, control
from kvcached.errors import KVCachedConfigError
from kvcached.instance import hardware
from tests.holders import Holder, compete, eventually, granted, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
PAGE, BLOCK = 2 * MIB, MIB // 2


@pytest.fixture
def holder(alone: None) -> Iterator[Callable[..., Holder]]:
    """Starts processes; they are killed after the test."""
    started: list[Holder] = []

    def start(name: str, **settings: Any) -> Holder:
        made = Holder(f"test-{name}-{os.getpid()}", **settings)
        started.append(made)
        assert made.hear() == "ready"
        return made

    yield start
    for each in started:
        each.end()


def test_terms_of_the_settings_are_in_force_from_the_first_page(holder: Callable[..., Holder]) -> None:
    one = holder("one", KVCACHED_LIMIT="8M", KVCACHED_MIN="4MiB")
    assert one.ask("alloc 17") is False
    assert one.ask("alloc 16") is True
    found = shown(one)
    assert (found.limit_bytes, found.min_bytes, found.used_bytes) == (8 * MIB, 4 * MIB, 8 * MIB)
    assert (found.device, found.pid, found.revision, found.state) == ("cpu", one.process.pid, 0, "applied")


def test_a_limit_is_lowered_drained_and_lifted_while_the_process_runs(holder: Callable[..., Holder]) -> None:
    one = holder("one")
    assert one.ask("alloc 32") is True
    answer = control.set_limit(one.name, 8 * MIB)
    assert (answer.state, answer.revision, answer.limit_bytes) == ("deferred", 1, 8 * MIB)
    assert one.ask("alloc 1") is False
    assert one.ask("free 16") is True
    assert eventually(lambda: shown(one).state == "applied")
    assert control.set_limit(one.name, 0).state == "deferred"
    assert one.ask("free 16") is True
    assert eventually(lambda: shown(one).state == "applied" and granted(one) == 0)
    assert one.ask("alloc 1") is False
    answer = control.set_limit(one.name, None)
    assert (answer.state, answer.limit_bytes) == ("applied", None)
    assert one.ask("alloc 64") is True


def test_revisions_keep_what_comes_late_from_undoing_what_came_later(holder: Callable[..., Holder]) -> None:
    one = holder("one")
    assert control.set_limit(one.name, 8 * MIB, revision=7).state == "applied"
    assert control.set_limit(one.name, 8 * MIB, revision=7).state == "applied"
    assert control.set_limit(one.name, 6 * MIB, revision=7).state == "conflict"
    late = control.set_limit(one.name, 6 * MIB, revision=6)
    assert (late.state, late.revision, late.limit_bytes) == ("stale", 7, 8 * MIB)
    assert control.set_min(one.name, 2 * MIB).revision == 8
    assert (shown(one).limit_bytes, shown(one).min_bytes) == (8 * MIB, 2 * MIB)


def test_a_budget_is_never_passed_and_a_killed_process_frees_its_part(holder: Callable[..., Holder]) -> None:
    one = holder("one", KVCACHED_DEVICE_BUDGET="32M")
    two = holder("two", KVCACHED_DEVICE_BUDGET="32M")
    assert one.ask("alloc 40") is True
    assert two.ask("alloc 40") is False
    assert two.ask("alloc 24") is True
    (budget,) = control.budgets()
    assert budget.budget_bytes == sum(member.granted_bytes for member in budget.members) == 32 * MIB
    one.end()
    killed = time.monotonic()
    assert two.ask("alloc 40") is True
    assert time.monotonic() - killed < 1


def test_a_minimum_is_kept_from_others_and_one_that_does_not_fit_is_rejected(
    holder: Callable[..., Holder],
) -> None:
    one = holder("one", KVCACHED_DEVICE_BUDGET="32M", KVCACHED_MIN="16M")
    two = holder("two", KVCACHED_DEVICE_BUDGET="32M")
    assert two.ask("alloc 33") is False
    assert two.ask("alloc 32") is True
    answer = control.set_min(two.name, 18 * MIB)
    assert (answer.state, answer.min_bytes) == ("rejected", 0)
    assert control.set_min(one.name, 8 * MIB).state == "applied"
    assert control.set_min(two.name, 18 * MIB).state == "applied"
    assert two.ask("alloc 16") is True
    assert one.ask("alloc 16") is True


def test_idle_memory_goes_to_who_waits_for_it(holder: Callable[..., Holder]) -> None:
    reserve = {"KVCACHED_MIN_RESERVED_MB": "16", "KVCACHED_MAX_RESERVED_MB": "16"}
    one = holder("one", KVCACHED_DEVICE_BUDGET="32M", **reserve)
    two = holder("two", KVCACHED_DEVICE_BUDGET="32M")
    assert granted(one) == 16 * MIB
    assert eventually(lambda: two.ask("alloc 60") is True), "it asks again, as schedulers do"
    assert granted(one) <= 2 * MIB


def test_one_that_starts_while_a_neighbour_holds_everything_gets_what_that_can_give(
    holder: Callable[..., Holder],
) -> None:
    reserve = {"KVCACHED_MIN_RESERVED_MB": "16", "KVCACHED_MAX_RESERVED_MB": "16"}
    one = holder("one", KVCACHED_DEVICE_BUDGET="16M", **reserve)
    assert granted(one) == 16 * MIB
    two = holder(
        "two", KVCACHED_DEVICE_BUDGET="16M", KVCACHED_MIN_RESERVED_MB="4", KVCACHED_MAX_RESERVED_MB="4"
    )
    assert granted(two) == 4 * MIB and granted(one) <= 12 * MIB


def test_four_that_compete_are_served_fairly_and_none_below_its_minimum(
    holder: Callable[..., Holder],
) -> None:
    """Of 40 pages, of which the first has 8 guaranteed; each wants 4 to 24 at a time. TEST_FAIRNESS_S for minutes."""
    common = {"KVCACHED_DEVICE_BUDGET": "80M", "num_blocks": 160}
    four = [holder("m0", KVCACHED_MIN="16M", **common)]
    four += [holder(f"m{number}", **common) for number in (1, 2, 3)]
    unit = 4 * (PAGE // BLOCK)
    seconds = float(os.environ.get("TEST_FAIRNESS_S", "5"))
    tallies = compete(four, [2 * unit, 0, 0, 0], unit, seconds, lambda: None)
    for one, tally in zip(four, tallies, strict=True):
        logging.getLogger("kvcached").info("%s: %s", one.name, tally)  # with pytest --log-cli-level=info
    served = [tally.blocks for tally in tallies]
    # In seconds it is chance who asks for more; in minutes nobody has less than the others.
    assert min(served) > (0.7 if seconds > 60 else 0.2) * max(served)
    assert max(tallies[0].waits_within_s, default=0.0) < 1.0, "what is guaranteed is there"
    assert max(max(tally.waits_s) for tally in tallies) < 5.0, "nobody is forgotten"


@pytest.mark.parametrize("settings", [{"KVCACHED_DEVICE_BUDGET": "64M"}, {"KVCACHED_MIN": "24M"}])
def test_what_others_live_by_is_no_reason_to_start(
    holder: Callable[..., Holder], settings: dict[str, str]
) -> None:
    holder("one", KVCACHED_DEVICE_BUDGET="32M", KVCACHED_MIN="16M")
    refused = Holder("test-refused", **{"KVCACHED_DEVICE_BUDGET": "32M"} | settings)
    _, said = refused.process.communicate(timeout=60)
    assert refused.process.returncode == 1
    assert "KVCachedConfigError" in said and "host" in said
    assert "test-refused" not in [instance.name for instance in control.instances()]


def test_what_cannot_be_asked_says_so(holder: Callable[..., Holder]) -> None:
    one = holder("one", KVCACHED_MIN="4M")
    with pytest.raises(KVCachedConfigError, match="no live instance"):
        control.set_limit("nobody", 1)
    with pytest.raises(KVCachedConfigError, match="below the minimum"):
        control.set_limit(one.name, MIB)
    with pytest.raises(KVCachedConfigError, match="wait_s"):
        control.set_limit(one.name, 8 * MIB, wait_s=-1)
    with pytest.raises((OverflowError, TypeError)):
        control.set_limit(one.name, -1)
    assert shown(one).limit_bytes is None


def test_a_record_shares_once_and_leaves_in_order(alone: None) -> None:
    record = _core.InstanceRecord(f"test-{os.getpid()}", "test 1.0", "cpu", limit_bytes=8, min_bytes=3)
    assert record.terms() == (8, 3) and record.shared_devices is None
    record.share([hardware("cpu")], cache_idle_s=1)
    assert record.shared_devices == ["host"]
    with pytest.raises(KVCachedConfigError, match="already"):
        record.share([hardware("cpu")])
    (budget,) = control.budgets()
    assert [member.min_bytes for member in budget.members] == [3]
    record.close()
    record.close()
    assert control.budgets() == []
    with pytest.raises(KVCachedConfigError, match="below the minimum"):
        _core.InstanceRecord("test", "test 1.0", "cpu", limit_bytes=2, min_bytes=3)

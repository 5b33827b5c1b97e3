"""Two real engines, a process each, that share a budget in which both do not fit at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import prompt

from kvcached import control, instance, observability
from kvcached.observability import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
PAGE = 4 * MIB  # 4 blocks of 32 tokens
BUDGET = 48 * MIB
ANSWER_S = 120.0


class Neighbour:
    """An engine's process."""

    def __init__(self, folder: str, name: str, **settings: str) -> None:
        here = Path(__file__).parent
        environ = {k: v for k, v in os.environ.items() if "KVCACHED" not in k}
        environ |= {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_STRICT": "1",
            "KVCACHED_IPC_NAME": name,
            "KVCACHED_PAGE_MB": str(PAGE // MIB),
            "KVCACHED_MAX_RESERVED_MB": "8",
            "KVCACHED_DEVICE_BUDGET": str(BUDGET),
        }
        environ["PYTHONPATH"] = os.pathsep.join([str(here), *sys.path])
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(here / "sharing_engine.py"), folder],
            env=environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, prompts: list[list[int]], max_tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompts, max_tokens]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("SAID "):
                return json.loads(line.removeprefix("SAID "))
        raise AssertionError(f"{self.name} ended: {self.process.wait()}")

    def run(self, prompts: list[list[int]], max_tokens: int = 8) -> dict[str, Any]:
        self.tell(prompts, max_tokens)
        return self.hear()

    @property
    def granted(self) -> int:
        return next(member.granted_bytes for member in the_budget().members if member.name == self.name)

    @property
    def shown(self) -> control.Instance:
        return next(each for each in control.instances() if each.name == self.name)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def the_budget() -> control.Budget:
    (budget,) = [budget for budget in control.budgets() if budget.device == "host"]
    assert sum(member.granted_bytes for member in budget.members) <= budget.budget_bytes
    return budget


@pytest.fixture
def neighbours(model_folder: str) -> Iterator[Callable[..., list[Neighbour]]]:
    """Starts engines at the same moment. This process, which may have had engines, shares nothing meanwhile."""
    record = instance._records.pop(os.getpid(), None)
    if record is not None:
        record.close()
    started: list[Neighbour] = []

    def start(*names: str, **settings: str) -> list[Neighbour]:
        made = [Neighbour(model_folder, f"{name}-{os.getpid()}", **settings) for name in names]
        started.extend(made)
        assert [each.hear() for each in made] == [{"elastic": True}] * len(made)
        return made

    yield start
    for each in started:
        each.kill()


def eventually(holds: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def burst(seed: int, requests: int = 7) -> list[list[int]]:
    """Of 7 requests x 150 tokens: 35 blocks, nine pages."""
    return [prompt(100 * seed + number, 150) for number in range(requests)]


def test_each_grows_into_what_the_other_leaves_and_tokens_are_those_of_an_engine_alone(neighbours) -> None:
    one, two = neighbours("one", "two")
    at_rest = one.granted
    assert at_rest == two.granted <= 3 * PAGE

    alone = two.run(burst(2))["tokens"]
    assert two.granted >= 9 * PAGE
    control.set_limit(two.name, 0)
    assert eventually(lambda: two.granted <= PAGE), "the null block's page stays"
    control.set_limit(two.name, None)

    first = one.run(burst(1))
    held = one.granted
    assert held >= 9 * PAGE, "the cached prefixes of its burst stay while there is room"
    again = one.run(burst(1))
    assert again["tokens"] == first["tokens"] and sum(again["hits"]) > 0

    # There is no room for two bursts: the neighbour's takes the memory of the first one's prefixes.
    burst_of_two = two.run(burst(2))
    assert burst_of_two["tokens"] == alone and sum(burst_of_two["hits"]) == 0
    assert one.granted < held

    # And back again: recomputed, not read from memory that was the other's.
    for _ in range(2):
        back = one.run(burst(1))
        assert back["tokens"] == first["tokens"]
        assert sum(back["hits"]) < sum(again["hits"])
        assert two.run(burst(2))["tokens"] == alone


def test_both_at_once_wait_for_each_other_and_finish(neighbours) -> None:
    one, two = neighbours("one", "two")
    expected = [one.run(burst(1)), two.run(burst(2))]
    for each, seed in ((one, 1), (two, 2)):
        each.tell(burst(seed) + burst(seed + 2), 8)
    found = [each.hear() for each in (one, two)]
    for before, after in zip(expected, found, strict=True):
        assert after["tokens"][:7] == before["tokens"]
    assert the_budget().budget_bytes == BUDGET


def evictions(of: Neighbour) -> int:
    """Times that cached prefixes of it were evicted for others."""
    (family,) = [f for f in observability.metrics([of.name]) if f.name == "kvcached_evictions_total"]
    return sum(sample.value for sample in family.samples if isinstance(sample.value, int))


def test_a_burst_asks_once_for_all_that_it_wants(neighbours) -> None:
    one, two = neighbours("one", "two")
    one.run(burst(1) + burst(3))
    assert one.granted >= 9 * PAGE, "its cached prefixes have the budget"
    before = evictions(one)
    two.run(burst(2))
    assert two.granted >= 8 * PAGE
    assert 1 <= evictions(one) - before <= 4, "for nine pages, which come a page or two a step"
    (waited,) = [f for f in observability.metrics([two.name]) if f.name == "kvcached_shortage_seconds"]
    assert sum(sample.value.sum for sample in waited.samples if isinstance(sample.value, Histogram)) < 0.8


def test_a_killed_engine_frees_its_share_and_limits_change_while_engines_run(neighbours) -> None:
    one, two = neighbours("one", "two")
    one.run(burst(1))
    assert one.granted >= 9 * PAGE

    # Lowered by somebody outside: the cached prefixes go, requests keep what they have.
    answer = control.set_limit(one.name, 4 * PAGE)
    assert answer.state in ("applied", "deferred") and answer.limit_bytes == 4 * PAGE
    assert eventually(lambda: one.shown.state == "applied" and one.granted <= 4 * PAGE)
    small = one.run([prompt(7, 100)])
    assert len(small["tokens"][0]) == 8 and one.granted <= 4 * PAGE
    assert control.set_limit(one.name, None).state == "applied"
    grown = one.run(burst(1))
    assert one.granted >= 9 * PAGE

    assert control.set_min(two.name, 20 * PAGE).state == "rejected"
    assert control.set_min(two.name, 2 * PAGE).state == "applied"
    one.kill()
    killed = time.monotonic()
    again = two.run(burst(1))
    assert again["tokens"] == grown["tokens"]
    assert [member.name for member in the_budget().members] == [two.name]
    assert time.monotonic() - killed < ANSWER_S


def test_an_idle_engine_gives_its_cached_prefixes_back_in_time(neighbours) -> None:
    (one,) = neighbours("one", KVCACHED_CACHE_IDLE_S="1")
    first = one.run(burst(1))
    assert eventually(lambda: one.granted <= 3 * PAGE)
    assert one.shown.cached_bytes == 0
    again = one.run(burst(1))
    assert again["tokens"] == first["tokens"] and sum(again["hits"]) == 0

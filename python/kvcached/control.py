"""What the engines of this user have of their GPUs, and how much each may have: `kvctl` from Python.

Any process of the user may ask; the engine that is named need not run in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvcached import _core

__all__ = [
    "Answer",
    "Budget",
    "Instance",
    "Member",
    "State",
    "budgets",
    "instances",
    "set_limit",
    "set_min",
]

State = Literal["applied", "deferred", "rejected", "stale", "conflict", "unanswered"]

ANSWER_WAIT_S = 5.0


@dataclass(frozen=True)
class Instance:
    """A running engine, at the moment of reading. Sizes in bytes; of an engine of several ranks those of one rank.

    `limit_bytes`: the most it may have, None without a limit. `min_bytes`: guaranteed to it, whether it uses them or not.
    `used_bytes`: under pages that hold blocks; `cached_bytes` of them hold nothing but cached prefixes. `reserved_bytes`: mapped and
    idle. `shortage_bytes`: what it was refused of late and still waits for. `revision`, `state`: of the latest change of limit or minimum.
    """

    name: str
    engine: str
    device: str
    pid: int
    limit_bytes: int | None
    min_bytes: int
    used_bytes: int
    reserved_bytes: int
    cached_bytes: int
    quarantined_bytes: int
    virtual_bytes: int
    shortage_bytes: int
    revision: int
    state: State


@dataclass(frozen=True)
class Member:
    """One engine's part of a budget, bytes: what it holds, what is guaranteed to it, what it waits for, what it could give back."""

    name: str
    granted_bytes: int
    min_bytes: int
    shortage_bytes: int
    givable_bytes: int


@dataclass(frozen=True)
class Budget:
    """What the engines of this user may have of one device together. `device`: "GPU-<uuid>", or "host"."""

    device: str
    budget_bytes: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Answer:
    """What came of a change.

    `state`: "applied"; "deferred": it holds for what is allocated from now on, and what is held beyond it goes as requests end;
    "rejected": the minimums of all engines of the device would pass its budget, or lost pages hold more than the limit; "stale": a later
    change stands, "conflict": another change of this very revision; "unanswered": the engine has not answered yet, and will.
    `revision`, `limit_bytes`, `min_bytes`: what is in force.
    """

    state: State
    revision: int
    limit_bytes: int | None
    min_bytes: int


def instances() -> list[Instance]:
    """All engines of this user that live, by name. What cannot be read is left out (`kvctl list` says why)."""
    return [Instance(**row) for row in _core.instances()]


def budgets() -> list[Budget]:
    """All devices that engines of this user share."""
    return [
        Budget(row["device"], row["budget_bytes"], tuple(Member(**member) for member in row["members"]))
        for row in _core.budgets()
    ]


def set_limit(
    name: str, limit_bytes: int | None, *, revision: int | None = None, wait_s: float = ANSWER_WAIT_S
) -> Answer:
    """Have this engine hold at most so many bytes of each of its devices; None: no limit, 0: drain it.

    Args:
        name: of the instance (`KVCACHED_IPC_NAME`). limit_bytes: whole pages count.
        revision: greater than the one in force, so that a change that comes late does not undo a newer one; None: the next.
        wait_s: how long to wait for the engine's answer, seconds.

    Raises:
        KVCachedConfigError: no such instance, or a limit below its minimum.
    """
    return Answer(*_core.ask(name, limit=(limit_bytes,), revision=revision, wait_s=wait_s))


def set_min(
    name: str, min_bytes: int, *, revision: int | None = None, wait_s: float = ANSWER_WAIT_S
) -> Answer:
    """Guarantee so many bytes of each of its devices to this engine. Arguments and errors as those of `set_limit`."""
    return Answer(*_core.ask(name, min_bytes=min_bytes, revision=revision, wait_s=wait_s))

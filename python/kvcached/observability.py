"""What this process's pools hold: pages, blocks, bytes; and what the engines of the user count and time.

What those hold is in `kvcached.control.instances`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from kvcached import _core

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Blocks",
    "Bytes",
    "Histogram",
    "MetricFamily",
    "Pages",
    "PoolSnapshot",
    "Sample",
    "Since",
    "metrics",
    "snapshot",
]


@dataclass(frozen=True)
class Pages:
    """Pages of a pool by state; their sum is all that it has. docs/ARCHITECTURE.md says what the states are."""

    free: int
    mapping: int
    reserved: int
    in_use: int
    retired: int
    unmapping: int
    withdrawn: int
    quarantined: int


@dataclass(frozen=True)
class Blocks:
    """Blocks of a pool. `held`: by somebody, the null block among them. `backed`: free, on pages that have memory. `available`: free
    and within the limit. `set_aside`: by `try_to_reserve`. `draining`: held, on pages that the limit empties.
    """

    num: int
    held: int
    backed: int
    available: int
    set_aside: int
    draining: int


@dataclass(frozen=True)
class Bytes:
    """Memory of a pool. `used`: under pages that hold blocks. `reserved`: mapped and idle. `mapped`: both. `beside`: zeros, and memory
    kept for later pages. `quarantined`: lost. `virtual`: addresses. `page`: of one page.
    """

    used: int
    reserved: int
    mapped: int
    beside: int
    quarantined: int
    virtual: int
    page: int


@dataclass(frozen=True)
class Since:
    """Pages since the pool was made, by who backed them or gave them back, and driver calls of its own thread that failed."""

    backed_on_demand: int
    backed_ahead: int
    given_back_behind: int
    pager_failures: int


@dataclass(frozen=True)
class PoolSnapshot:
    """One pool at one moment. `owner`: the engine with its version, or "kvcached" for a `KVCacheManager`; of an engine of several
    ranks the numbers are those of one rank.
    """

    owner: str
    device: str
    layout: str
    pages: Pages
    blocks: Blocks
    bytes: Bytes
    since_start: Since

    @classmethod
    def of(cls, stats: Mapping[str, int], *, owner: str, device: str, layout: str) -> PoolSnapshot:
        """From `kvcached._core.Pool.stats`."""
        since = {
            "backed_on_demand": stats["pages_backed_on_demand"],
            "backed_ahead": stats["pages_backed_ahead"],
            "given_back_behind": stats["pages_given_back_behind"],
            "pager_failures": stats["pager_failures"],
        }
        return cls(
            owner,
            device,
            layout,
            Pages(**_ending(Pages, stats, "_pages")),
            Blocks(num=stats["num_blocks"], **_ending(Blocks, stats, "_blocks", but=("num",))),
            Bytes(**_ending(Bytes, stats, "_bytes")),
            Since(**since),
        )


def snapshot() -> list[PoolSnapshot]:
    """All open pools of this process: those of its engines, and `KVCacheManager`s."""
    from kvcached.integration.memory import EngineMemory
    from kvcached.kv_cache_manager import KVCacheManager

    engines = [
        PoolSnapshot.of(
            memory.pool.stats(),
            owner=memory.launch.name,
            device=memory.devices,
            layout=memory.pool.geometry.explain(),
        )
        for memory in EngineMemory.live()
        if memory.pool is not None
    ]
    managers = [
        PoolSnapshot.of(
            manager.stats(), owner="kvcached", device=manager.ftensor.device, layout=manager.layout
        )
        for manager in KVCacheManager.live()
    ]
    return engines + managers


@dataclass(frozen=True)
class Histogram:
    """How long something took. `buckets`: bounds in seconds, the last one infinite, and how many took no longer than each. `sum`: seconds
    of all.
    """

    buckets: tuple[tuple[float, int], ...]
    sum: float


@dataclass(frozen=True)
class Sample:
    """One figure: of what, and how much."""

    labels: Mapping[str, str]
    value: int | Histogram


@dataclass(frozen=True)
class MetricFamily:
    """Figures of one meaning, as Prometheus names them; docs/KVCTL.md lists them all."""

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"]
    samples: tuple[Sample, ...]


def metrics(instances: Sequence[str] | None = None) -> list[MetricFamily]:
    """What all instances of this user, or those with these names, hold, count and time, and the budgets that they live by: the figures of
    `kvctl metrics`. An instance that is not there has none.
    """
    return [
        MetricFamily(name, meaning, kind, tuple(_sample(*each) for each in samples))
        for name, meaning, kind, samples in _core.metric_families(instances)
    ]


def _sample(labels: dict[str, str], value: int | tuple[list[tuple[float, int]], float]) -> Sample:
    if isinstance(value, int):
        return Sample(labels, value)
    buckets, total = value
    return Sample(labels, Histogram(tuple(buckets), total))


def _ending(
    kind: type[Any], stats: Mapping[str, int], ending: str, but: tuple[str, ...] = ()
) -> dict[str, int]:
    return {name: stats[name + ending] for name in get_type_hints(kind) if name not in but}

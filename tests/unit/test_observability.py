"""`kvcached.observability`: typed numbers of this process's pools."""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import TYPE_CHECKING

import pytest

from kvcached import KVCacheManager, _core, observability, vmm_ops
from kvcached.config import Settings
from kvcached.integration.plan import Agreement
from kvcached.observability import Histogram, PoolSnapshot
from tests.memories import reserved_memory
from tests.ranges import host_range

KIB = 1 << 10

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    vmm_ops.init_kvcached("cpu")
    made = KVCacheManager(1024, 16, 4 * KIB, 2)
    yield made
    made.shutdown()
    vmm_ops.shutdown_kvcached()


def test_a_managers_numbers_follow_what_is_allocated(manager: KVCacheManager) -> None:
    (before,) = observability.snapshot()
    ids = manager.alloc(100)
    assert ids is not None
    (after,) = observability.snapshot()
    assert (before.owner, before.device, before.layout) == ("kvcached", "cpu", manager.layout)
    assert after.blocks.held - before.blocks.held == 100
    assert after.bytes.used == after.pages.in_use * after.bytes.page > before.bytes.used
    assert sum(astuple(after.pages)) == sum(astuple(before.pages)) == manager.geometry.num_pages(1024)
    assert after.since_start.backed_on_demand > 0
    manager.free(ids)
    assert observability.snapshot()[0].blocks.held == before.blocks.held


@pytest.fixture
def instance() -> Iterator[str]:
    """Counts what a pool of one page in its record does: maps it, and misses."""
    record = _core.InstanceRecord("counts", "test 1", "cpu", limit_bytes=5 << 20)
    ftensor = host_range(num_blocks=4)
    pool = _core.Pool(ftensor, record=record, pool_name="kv")
    assert pool.alloc(4) is not None and pool.alloc(1) is None
    yield record.name
    pool.shutdown()
    record.close()


def test_what_an_instance_counts_is_shown_by_name_and_meaning(instance: str) -> None:
    shown = {family.name: family for family in observability.metrics([instance])}
    (mapped,) = shown["kvcached_mapped_pages_total"].samples
    assert (mapped.labels, mapped.value) == ({"instance": instance, "engine": "test 1", "device": "cpu"}, 1)
    (missed,) = shown["kvcached_allocation_misses_total"].samples
    assert missed.value == 1
    (used,) = shown["kvcached_used_bytes"].samples
    assert (used.labels["pool"], used.value) == ("kv", 64 * KIB)
    assert shown["kvcached_limit_bytes"].samples[0].value == 5 << 20
    (mapping,) = shown["kvcached_map_seconds"].samples
    assert isinstance(mapping.value, Histogram)
    bounds = [bound for bound, _ in mapping.value.buckets]
    counts = [count for _, count in mapping.value.buckets]
    assert bounds == sorted(bounds) and bounds[0] == 16e-6 and bounds[-1] == float("inf")
    assert counts == sorted(counts) and counts[-1] == 1 and 0 < mapping.value.sum < 10
    assert {family.kind for family in shown.values()} == {"gauge", "counter", "histogram"}


def test_only_the_instances_that_are_asked_for_are_shown(instance: str) -> None:
    def of(names: list[str] | None) -> set[str]:
        samples = [sample for family in observability.metrics(names) for sample in family.samples]
        return {sample.labels["instance"] for sample in samples if "instance" in sample.labels}

    assert of([instance, "nobody"]) == {instance} <= of(None)
    assert observability.metrics(["nobody"]) == []


def test_a_pool_that_was_shut_down_is_not_shown(manager: KVCacheManager) -> None:
    assert len(observability.snapshot()) == 1
    manager.shutdown()
    assert observability.snapshot() == []


def test_every_number_of_a_pool_is_in_a_snapshot_once(manager: KVCacheManager) -> None:
    stats = {name: 1000 + place for place, name in enumerate(manager.stats())}
    taken = PoolSnapshot.of(stats, owner="o", device="d", layout="l")
    parts = (taken.pages, taken.blocks, taken.bytes, taken.since_start)
    numbers = [number for part in parts for number in asdict(part).values()]
    missing = {name for name, number in stats.items() if number not in numbers}
    assert missing == {"ahead_pages"}, "what the pager aims at is no state"
    assert len(numbers) == len(set(numbers))


def test_an_engine_is_shown_once_it_has_a_pool() -> None:
    agreement = Agreement(("k", "v"), 64 * KIB, 16, 512)
    memory = reserved_memory(Settings(), agreement, engine="engine")
    try:
        assert observability.snapshot() == []
        memory.open_pool()
        (shown,) = observability.snapshot()
        assert (shown.owner, shown.device, shown.blocks.num, shown.blocks.held) == (
            "engine test",
            "cpu",
            512,
            1,
        )
    finally:
        memory.close()
    assert observability.snapshot() == []

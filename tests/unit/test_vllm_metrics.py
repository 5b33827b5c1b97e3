"""What vLLM's /metrics shows of kvcached, without vLLM: whose figures, and in which form."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvcached import _core
from kvcached.errors import KVCachedConfigError
from kvcached.integration.vllm import metrics

prometheus_client = pytest.importorskip("prometheus_client")

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHERS = """
import sys
from kvcached import _core
record = _core.InstanceRecord(sys.argv[1], "test 1", "cpu")
print("made", flush=True)
sys.stdin.read()
"""


def other(name: str) -> subprocess.Popen[str]:
    """A process of ours that has an instance record."""
    child = subprocess.Popen(
        [sys.executable, "-c", OTHERS, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "made\n"
    return child


@pytest.fixture
def own(alone: None) -> Iterator[_core.InstanceRecord]:
    record = _core.InstanceRecord("own", "test 1", "cpu")
    yield record
    record.close()


def shown() -> set[str]:
    families = list(metrics.Collector().collect())
    return {sample.labels["instance"] for family in families for sample in family.samples}


def test_instances_of_this_server_are_shown_and_no_others(own, monkeypatch):
    with other("child") as child:
        assert shown() == {"own", "child"}
        # One of several front ends: what its server has started.
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
        monkeypatch.setattr(os, "getppid", lambda: child.pid)
        assert shown() == {"child"}
        monkeypatch.setattr(os, "getppid", lambda: 2**22 + 5)
        assert shown() == set()
        child.communicate()


def test_a_registry_shows_them_once_and_in_its_own_form(own):
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    get = metrics.with_our_figures(lambda: registry)
    assert get() is registry and get() is registry
    text = prometheus_client.generate_latest(registry).decode()
    assert text.count("# TYPE kvcached_mapped_pages_total counter") == 1
    assert 'kvcached_refusals_total{by="limit",device="cpu",engine="test 1",instance="own"} 0.0' in text
    assert 'kvcached_map_seconds_bucket{device="cpu",engine="test 1",instance="own",le="1.6e-05"} 0.0' in text
    assert 'kvcached_map_seconds_count{device="cpu",engine="test 1",instance="own"} 0.0' in text


def test_what_cannot_be_read_is_no_failure_of_the_server(own, monkeypatch, caplog):
    def refused(_: object) -> None:
        raise KVCachedConfigError("the directory is not ours")

    monkeypatch.setattr(_core, "metric_families", refused)
    assert list(metrics.Collector().collect()) == []
    assert "shows nothing of kvcached: the directory is not ours" in caplog.text

"""vLLM's own /metrics shows what the KV caches of its engines do.

Engines run in processes of their own; what they count lies in shared memory, from where the front end takes it when it is scraped.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wrapt

from kvcached import control, observability
from kvcached.errors import KVCachedError
from kvcached.integration.patching import SeamError
from kvcached.observability import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.integration.patching import PatchSet

__all__ = ["Collector", "install", "with_our_figures"]

logger = logging.getLogger("kvcached")

MODULE = "vllm.v1.metrics.prometheus"

_shown: weakref.WeakSet[Any] = weakref.WeakSet()


def install(patches: Callable[[], PatchSet], version: Callable[[], str]) -> None:
    """Put the seam in place as soon as vLLM's metrics are imported. An engine does not fail for want of it: a warning says so.

    Args:
        patches: with the one seam, for the version that is installed.
        version: of vLLM.
    """

    def put(_module: Any) -> None:
        try:
            seams = patches()
            seams.verify(version())
            seams.apply()
        except SeamError as error:
            logger.warning("vLLM's /metrics will show nothing of kvcached (kvctl metrics does): %s", error)

    wrapt.register_post_import_hook(put, MODULE)


def with_our_figures(original: Any) -> Any:
    """Of `get_prometheus_registry`: whatever registry it is, our figures are in it."""

    @functools.wraps(original)
    def get_prometheus_registry() -> Any:
        registry = original()
        if registry not in _shown:
            registry.register(Collector())
            _shown.add(registry)
        return registry

    return get_prometheus_registry


class Collector:
    """What prometheus_client asks at each scrape. All instances of this server: those of this process and of the processes that it, or
    the server that it is a front end of, has started.
    """

    def describe(self) -> list[Any]:
        """Nothing: what there is to show is known when it is shown."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families of kvctl metrics, as prometheus_client has them."""
        try:
            root = os.getpid() if multiprocessing.parent_process() is None else os.getppid()
            names = [each.name for each in control.instances() if root in _ancestry(each.pid)]
            families = observability.metrics(names)
        except KVCachedError as error:
            logger.warning("vLLM's /metrics shows nothing of kvcached: %s", error)
            return
        yield from map(_converted, families)


def _converted(family: observability.MetricFamily) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kind = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    labels = list(dict.fromkeys(name for sample in family.samples for name in sample.labels))
    made = kind[family.kind](family.name, family.help, labels=labels)
    for sample in family.samples:
        values = [sample.labels.get(name, "") for name in labels]
        if isinstance(sample.value, Histogram):
            bounds = ["+Inf" if bound == float("inf") else repr(bound) for bound, _ in sample.value.buckets]
            counts = [count for _, count in sample.value.buckets]
            made.add_metric(values, list(zip(bounds, counts, strict=True)), sample.value.sum)
        else:
            made.add_metric(values, sample.value)
    return made


def _ancestry(pid: int) -> Iterator[int]:
    """This process, its parent, and so on, as far as can be seen."""
    while pid > 1:
        yield pid
        try:
            # proc(5): the name may hold anything; the parent is the second field after its closing bracket.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return

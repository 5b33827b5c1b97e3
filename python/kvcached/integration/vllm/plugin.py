"""Where vLLM lets us in: the constructor of the executor, and in a process that holds a worker that of the worker.

vLLM calls `register` (entry point `vllm.general_plugins`) in every process it starts, front ends and model
inspection among them. Only where an engine runs is an executor constructed, and that before its workers, its
memory profile, its KV cache and its scheduler exist. A worker in a process of its own is told by the config that it is given whether
its engine is one of ours.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedConfigError, KVCachedError
from kvcached.integration import entry
from kvcached.integration.memory import EngineMemory
from kvcached.integration.patching import Seam, Versions
from kvcached.integration.rank import RankMemory
from kvcached.integration.remote import RemoteRanks
from kvcached.integration.vllm import metrics, native, ranks, refusals, seams

if TYPE_CHECKING:
    from kvcached.integration.launch import Launch
    from kvcached.integration.patching import PatchSet

__all__ = ["install", "patch_sets", "register"]


def _executor_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any) -> None:  # noqa: N807
        config = vllm_config.cache_config
        EngineMemory.detach(config)
        RankMemory.detach(config)
        local = not refusals.has_worker_processes(type(self))
        launch = entry.start(
            "vllm",
            _version,
            lambda version: patch_sets(version, vllm_config, scheduler=True, worker=local),
            lambda: refusals.check_engine(vllm_config, type(self)),
        )
        if launch is None:
            original(self, vllm_config)
            return
        memory = _memory(launch, self, config, local)
        original(self, vllm_config)
        try:
            refusals.check_ranks(self.get_kv_cache_specs())
            ranks.ask(self, ranks.check)
        except KVCachedError as error:
            native.run_natively(self, error)
            return
        # An engine that is dropped without a shutdown leaves nothing behind.
        weakref.finalize(self, memory.close).atexit = False

    return __init__


def _memory(launch: Launch, executor: Any, config: Any, local: bool) -> EngineMemory:
    """The two halves of an engine's memory, attached to its cache config, with which the rank's half travels to every worker."""
    rank = RankMemory(launch)
    rank.attach(config)
    found = weakref.ref(executor)

    def barrier(timeout_s: float) -> None:
        ranks.ask(found(), ranks.synchronise, timeout_s=timeout_s)

    memory = EngineMemory(launch, rank if local else RemoteRanks(launch, barrier))
    memory.attach(config)
    return memory


def _worker_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        rank = RankMemory.of(vllm_config.cache_config)
        if rank is not None:
            try:
                entry.put_in_place(rank.launch, lambda version: patch_sets(version, vllm_config, worker=True))
                rank.obstacle = None
            except Exception as error:  # said where the scheduler is, which asks
                known = isinstance(error, KVCachedError)
                rank.obstacle = error if known else KVCachedConfigError(f"kvcached cannot be used: {error!r}")
        original(self, vllm_config, *args, **kwargs)

    return __init__


def patch_sets(
    version: str, vllm_config: Any, *, scheduler: bool = False, worker: bool = False
) -> list[PatchSet]:
    """The seams of this process's engines: one set for the scheduler and one for the worker, each applied once, whatever the number
    of engines.
    """
    device_type = vllm_config.device_config.device_type
    return [_scheduler_set(version)] * scheduler + [_worker_set(version, device_type)] * worker


@functools.cache
def _front_end_set() -> PatchSet:
    return seams.front_end_set(_version())


_scheduler_set = functools.cache(seams.scheduler_set)
_worker_set = functools.cache(seams.worker_set)


def _version() -> str:
    from vllm.version import __version__

    return str(__version__)


_ENTRIES = (
    entry.Entry(
        "vllm",
        Seam(
            "vllm.v1.executor.abstract:Executor.__init__",
            _executor_init,
            ("self", "vllm_config"),
            Versions("0", "1000"),
            "constructed only where an engine runs, before anything that we change",
        ),
        _version,
    ),
    entry.Entry(
        "vllm",
        Seam(
            "vllm.v1.worker.worker_base:WorkerBase.__init__",
            _worker_init,
            ("self", "vllm_config", ...),
            Versions("0", "1000"),
            "constructed only where a worker runs, before it touches its device",
        ),
        _version,
    ),
)


def register() -> None:
    """Put the seams in place, if this environment asks for it. Called any number of times."""
    for each in _ENTRIES:
        each.register()
    if entry.wanted():
        metrics.install(_front_end_set, _version)


def install() -> None:
    """Put the seams in place as soon as vLLM is imported; now, if it already is."""
    for each in _ENTRIES:
        each.install()
    metrics.install(_front_end_set, _version)

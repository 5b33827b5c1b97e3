"""The scheduler's half of an engine's elastic memory: from the KV cache that was agreed to the pool that its scheduler draws from.

Knows no engine: what an engine laid out reaches it as an `Agreement`. The memory itself is a rank's (`rank.py`), in this process or
in others (`remote.py`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from kvcached import _core
from kvcached.errors import KVCachedError
from kvcached.instance import discard_record, has_record, process_record, shares
from kvcached.integration.attached import Attached
from kvcached.integration.kernels import weakest
from kvcached.integration.plan import Plan, devices_shown
from kvcached.integration.remote import RemoteRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.instance import Hardware
    from kvcached.integration.launch import Launch
    from kvcached.integration.plan import Agreement, Survey
    from kvcached.integration.rank import RankMemory

__all__ = ["EngineMemory", "PrefixCache"]

logger = logging.getLogger("kvcached")

EVICTED_AT_ONCE_BYTES = 256 << 20
"""An engine that wants to go on waits for no more: vLLM evicts some 500 blocks a millisecond."""
LET_PASS_S = 0.0005
"""Between two of them, so that an engine that waits is next: a lock is not handed over, and whoever releases it would have it again."""

GIVE_TIMEOUT_S = 1.0
"""How long who waits for memory waits for an engine's scheduler to return."""

_engine_numbers = itertools.count()  # in one process, whose record has a row for each pool
_live: weakref.WeakSet[EngineMemory] = weakref.WeakSet()


class PrefixCache(Protocol):
    """What an engine keeps of requests that have ended, for those to come, in blocks of the pool."""

    @property
    def cached_bytes(self) -> int:
        """Memory under blocks that are cached and that no request uses. Cheap, and read by any thread."""

    def evict(self, nbytes: int) -> int:
        """Have pages of at least `nbytes` empty, as far as that can be; returns the bytes of those that did."""


class EngineMemory(Attached):
    """What the scheduler of one engine has of us, and with it the engine as others see it. Engines in one process know nothing of
    each other.

    It is met in this order: whoever starts the engine (`attach`), the KV cache once it is agreed (`decide`, after which the ranks
    reserve), the scheduler (`open_pool`, `adopt_cache`, epochs), the end (`close`). Other threads come in by `give_cached` and
    `cached_bytes` alone.

    Args:
        launch: of the engine.
        ranks: where its memory is.
    """

    _attribute = "_kvcached_memory"

    def __init__(self, launch: Launch, ranks: RankMemory | RemoteRanks) -> None:
        self.launch = launch
        self.ranks = ranks
        self.plan: Plan | None = None
        self.devices = ""
        """Of all ranks, as others see them."""
        self._hardware: list[Hardware] = []
        self._made_record = False  # it did not exist before
        self._started = False
        self.pool: _core.Pool | None = None
        self.latest_epoch = 0
        """What `begin_epoch` returned last."""
        self.ended_epoch = 0
        """Up to here all work has ended."""
        self.at_rest = threading.RLock()
        """Held by the engine's thread in each call of its scheduler that may touch a block, and by whoever takes blocks from the
        engine. In such a call a cached block may have been found for a request that does not hold it yet; evicted then, it would be
        used with other content. Taken by the engine's thread some times a step, and rarely by others.
        """
        self._cache: PrefixCache | None = None
        self._is_idle: Callable[[], bool] = lambda: False

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # there is one scheduler, in this process

    @staticmethod
    def live() -> list[EngineMemory]:
        """Those of this process that have memory."""
        return list(_live)

    # ------------------------------------------------------------ the plan

    def decide(self, agreement: Agreement, surveys: Sequence[Survey]) -> Plan:
        """What all ranks are to reserve.

        Args:
            agreement: the same for all of them.
            surveys: one of each rank.

        Raises:
            GeometryError: no page fits, or ids would pass 2^31.
            KVCachedConfigError: the name of this instance is taken.
            TermsError: no page fits its limit, or its minimum or its budget does not fit those of others.
        """
        devices = devices_shown([survey.device for survey in surveys])
        self._hardware = [survey.hardware for survey in surveys]
        ground = weakest([survey.ground for survey in surveys])
        plan = Plan(
            agreement,
            ground,
            max(survey.granularity for survey in surveys),
            self.launch.settings.page_bytes,
        )
        geometry = plan.geometry()
        # A taken name, and terms that cannot be kept, are refused before anything is allocated.
        self._made_record |= not has_record()
        process_record(self.launch.name, devices, self._hardware, geometry.page_bytes)
        for warning in sorted({survey.ground.warning for survey in surveys} - {""}):
            logger.warning("%s", warning)
        logger.info(
            "elastic KV cache on %s: %d buffers, %d blocks, unbacked memory %s; %s",
            devices,
            len(agreement.buffers),
            agreement.num_blocks,
            ground.unbacked,
            geometry.explain(),
        )
        self.plan, self.devices = plan, devices
        _live.add(self)
        return plan

    # ------------------------------------------------------------ the pool

    def open_pool(self) -> _core.Pool:
        """The pool over the ranks' memory; from now on it alone maps and unmaps pages."""
        if self.plan is None:
            raise _core.StateConsistencyError("the KV cache of this engine is not agreed")
        record = process_record(self.launch.name, self.devices, self._hardware)
        self.pool = _core.Pool(
            self.ranks.open(),
            geometry=self.plan.geometry(),
            num_blocks=self.plan.agreement.num_blocks,
            reserve_null_block=True,
            async_sched=True,
            record=record,
            charged=shares(record, self._hardware),
            pool_name=f"engine {next(_engine_numbers)}",
            **self.launch.settings.pool_options,
        )
        record.set_cached(_give_cached, _cached_bytes)
        self._started = True
        return self.pool

    def begin_epoch(self) -> int:
        """Work is about to be queued that may read any page which is mapped now. Returns its epoch."""
        self.latest_epoch = self._opened().begin_epoch()
        return self.latest_epoch

    def release_through(self, epoch: int) -> None:
        """All work up to this epoch has ended: what was freed by then may leave."""
        self._opened().release_through(epoch)
        self.ended_epoch = max(self.ended_epoch, epoch)

    def synchronise(self) -> None:
        """Wait for all work of the engine, on all ranks."""
        self.ranks.synchronise()

    # ------------------------------------------------------------ cached prefixes

    def adopt_cache(self, cache: PrefixCache, is_idle: Callable[[], bool]) -> None:
        """The engine's scheduler caches prefixes.

        Args:
            cache: of its blocks; evicts only while `at_rest` is held.
            is_idle: no request is waiting or running. Asked while `at_rest` is held.
        """
        self._cache, self._is_idle = cache, is_idle

    @property
    def cached_bytes(self) -> int:
        """Memory under cached prefixes that no request uses. A page of it goes back only when all that it holds is such."""
        cache = self._cache
        return 0 if cache is None else cache.cached_bytes

    def give_cached(self, nbytes: int, timeout_s: float) -> int:
        """Evict cached prefixes so that whole pages empty, the least recently used first. Called by a thread that is not the engine's.

        What empties goes the way of all that is freed: at once, or when the batches that were begun have ended.

        Args:
            nbytes: how much is wanted.
            timeout_s: how long to wait for the engine's scheduler to return; a step's GPU work does not count.

        Returns:
            Bytes of the pages that emptied: at least `nbytes`, or all that could be had in the time.
        """
        given, deadline = 0, time.monotonic() + timeout_s
        while given < nbytes and self._cache is not None:
            wanted = min(nbytes - given, EVICTED_AT_ONCE_BYTES)
            if not self.at_rest.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break
            try:
                evicted = self._evict(wanted)
            finally:
                self.at_rest.release()
            given += evicted
            if evicted < wanted:
                break
            time.sleep(LET_PASS_S)
        return given

    def _evict(self, nbytes: int) -> int:
        cache = self._cache
        if cache is None or self.pool is None:
            return 0
        try:
            evicted = cache.evict(nbytes)
            if evicted:
                self._end_epochs_of_an_idle_engine()
        except KVCachedError:
            if self.pool is None:  # closed meanwhile: all of it has gone back
                return 0
            raise
        return evicted

    def _end_epochs_of_an_idle_engine(self) -> None:
        """Whoever drives an engine in its own process may stop before it has asked for the output of the last batch, after an abort for
        instance. Work of no request is still queued then, and nothing would end its epoch.

        Not with workers in other processes: the way to them has one writer, the engine's thread. There an engine that idles asks for all
        outputs, or has its next step release the pages.
        """
        if (
            self.ended_epoch < self.latest_epoch
            and self._is_idle()
            and not isinstance(self.ranks, RemoteRanks)
        ):
            self.synchronise()
            self.release_through(self.latest_epoch)

    def _opened(self) -> _core.Pool:
        if self.pool is None:
            raise _core.StateConsistencyError("the pool of this engine is not open, or closed already")
        return self.pool

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        pool, self.pool = self.pool, None
        # Not under `at_rest`: the engine's thread may be stuck where only this close can help.
        self._cache, self._is_idle = None, lambda: False
        _live.discard(self)
        failed, self._made_record = self._made_record and not self._started, False
        self.ranks.close(pool)
        if failed and not _live:
            discard_record()


def _give_cached(nbytes: int) -> int:
    """Of all engines of this process; called by the thread that looks after them."""
    given = 0
    for memory in EngineMemory.live():
        if given >= nbytes:
            break
        given += memory.give_cached(nbytes - given, GIVE_TIMEOUT_S)
    return given


def _cached_bytes() -> int:
    return sum(memory.cached_bytes for memory in EngineMemory.live())

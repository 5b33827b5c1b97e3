"""The scheduler's half of an engine's elastic memory: from the KV cache that was agreed to the pool that its scheduler draws from.

Knows no engine: what an engine laid out reaches it as an `Agreement`. The memory itself is a rank's (`rank.py`), in this process or
in others (`remote.py`).
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import TYPE_CHECKING, Any

from kvcached import _core
from kvcached.instance import process_record
from kvcached.integration.attached import Attached
from kvcached.integration.kernels import weakest
from kvcached.integration.plan import Plan, devices_shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.integration.launch import Launch
    from kvcached.integration.plan import Agreement, Survey
    from kvcached.integration.rank import RankMemory
    from kvcached.integration.remote import RemoteRanks

__all__ = ["EngineMemory"]

logger = logging.getLogger("kvcached")

_engine_numbers = itertools.count()  # in one process, whose record has a row for each pool
_live: weakref.WeakSet[EngineMemory] = weakref.WeakSet()


class EngineMemory(Attached):
    """What the scheduler of one engine has of us, and with it the engine as others see it. Engines in one process know nothing of
    each other.

    It is met in this order: whoever starts the engine (`attach`), the KV cache once it is agreed (`decide`, after which the ranks
    reserve), the scheduler (`open_pool`, epochs), the end (`close`).

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
        self.pool: _core.Pool | None = None
        self.latest_epoch = 0
        """What `begin_epoch` returned last."""

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
        """
        devices = devices_shown([survey.device for survey in surveys])
        process_record(self.launch.name, devices)  # a taken name is refused before anything is allocated
        ground = weakest([survey.ground for survey in surveys])
        plan = Plan(
            agreement,
            ground,
            max(survey.granularity for survey in surveys),
            self.launch.settings.page_bytes,
        )
        geometry = plan.geometry()
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
        self.pool = _core.Pool(
            self.ranks.open(),
            geometry=self.plan.geometry(),
            num_blocks=self.plan.agreement.num_blocks,
            reserve_null_block=True,
            async_sched=True,
            record=process_record(self.launch.name, self.devices),
            pool_name=f"engine {next(_engine_numbers)}",
            **self.launch.settings.pool_options,
        )
        return self.pool

    def begin_epoch(self) -> int:
        """Work is about to be queued that may read any page which is mapped now. Returns its epoch."""
        self.latest_epoch = self._opened().begin_epoch()
        return self.latest_epoch

    def release_through(self, epoch: int) -> None:
        """All work up to this epoch has ended: what was freed by then may leave."""
        self._opened().release_through(epoch)

    def synchronise(self) -> None:
        """Wait for all work of the engine, on all ranks."""
        self.ranks.synchronise()

    def _opened(self) -> _core.Pool:
        if self.pool is None:
            raise _core.StateConsistencyError("the pool of this engine is not open, or closed already")
        return self.pool

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        pool, self.pool = self.pool, None
        _live.discard(self)
        self.ranks.close(pool)

"""The ranks of an engine whose workers are processes of their own, as its scheduler's process sees them.

Knows no engine. The memory itself is in the workers (`rank.py`); here is only the way to it.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcached import _core
from kvcached.errors import KVCachedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.integration.launch import Launch

__all__ = ["RemoteRanks"]

logger = logging.getLogger("kvcached")


class RemoteRanks:
    """The way from a scheduler's pool to the memory of every rank.

    Args:
        launch: of the engine.
        barrier: returns when every rank has done all that was asked of it before, on its device too. Work that the scheduler has
            sent may still wait in front of a worker, where no rank server sees it: so this goes the way of that work.
    """

    def __init__(self, launch: Launch, barrier: Callable[[], object]) -> None:
        self._launch, self._barrier = launch, barrier
        self._addresses: tuple[str, ...] = ()
        self._ranks: _core.Ranks | None = None

    def served_at(self, addresses: Sequence[str]) -> None:
        """Where each rank is reached, in order of their numbers."""
        self._addresses = tuple(addresses)

    def open(self) -> _core.Ranks:
        """Connect to all ranks; what they have mapped beyond page 0 is unmapped.

        Raises:
            KVCachedError: a rank does not answer, or they do not have the same geometry.
        """
        members = [(0, rank, address) for rank, address in enumerate(self._addresses)]
        self._ranks = _core.Ranks(members, keep=(0,), timeout_s=self._launch.settings.ipc_timeout_s)
        return self._ranks

    def synchronise(self) -> None:
        """Wait for all work that was sent to the ranks."""
        self._barrier()

    def close(self, pool: _core.Pool | None = None) -> None:
        """Nothing is asked of the ranks any more. Idempotent.

        Args:
            pool: drew from them, and ends with them. Where a worker has ended its memory has gone with it, and there is nothing
                to give back.
        """
        ranks, self._ranks = self._ranks, None
        addresses, self._addresses = self._addresses, ()
        try:
            if pool is not None:
                pool.shutdown()
        except KVCachedError as error:
            logger.debug("the ranks have ended before their pool: %s", error)
        if ranks is not None:
            ranks.close()
        for address in addresses:
            with suppress(OSError):
                os.unlink(address)  # of a worker that was killed

"""The ranks of an engine whose workers are processes of their own, as its scheduler's process sees them.

Knows no engine. The memory itself is in the workers (`rank.py`); here is only the way to it.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcached import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.integration.launch import Launch

__all__ = ["RemoteRanks"]

logger = logging.getLogger("kvcached")

BARRIER_TIMEOUT_S = 300.0
"""As long as vLLM waits for a batch."""


class RemoteRanks:
    """The way from a scheduler's pool to the memory of every rank.

    Args:
        launch: of the engine.
        barrier: called with a limit in seconds, returns when every rank has done all that was sent to it before, on its device too.
            Work of the scheduler may still wait in front of a worker, where no rank server sees it: so this goes the way of that
            work.
    """

    def __init__(self, launch: Launch, barrier: Callable[[float], object]) -> None:
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
        """Wait for all work that was sent to the ranks.

        Raises:
            TimeoutError: after `BARRIER_TIMEOUT_S`.
        """
        self._barrier(BARRIER_TIMEOUT_S)

    def close(self, pool: _core.Pool | None = None) -> None:
        """Give all memory back, and ask nothing of the ranks any more. Idempotent.

        Args:
            pool: draws from them, and ends here.
        """
        ranks, self._ranks = self._ranks, None
        addresses, self._addresses = self._addresses, ()
        if ranks is not None and (pool is None or self._ends(ranks, pool)):
            ranks.close()
        for address in addresses:
            with suppress(OSError):
                os.unlink(address)  # of a worker that was killed

    def _ends(self, ranks: _core.Ranks, pool: _core.Pool) -> bool:
        """Whether the pool ended in order. Otherwise it stays as it is, broken, so that whoever asks it is told by whom: a worker has
        died, and its memory with it, and the others are about to.
        """
        if ranks.broken is not None:
            return False
        try:
            self._barrier(self._launch.settings.ipc_timeout_s)
            pool.shutdown()
        except Exception as error:
            logger.debug("the ranks' memory goes with their processes: %s", error)
            return False
        return True

"""Engines that kvcached does not carry: they run natively with one clear warning, or do not start
(`KVCACHED_STRICT`).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError
from kvcached.integration.vllm.memory import EngineMemory

__all__ = ["decline", "run_natively"]

logger = logging.getLogger("kvcached")


def decline(error: Exception) -> None:
    """Nothing was changed yet: warn and let the engine start without us.

    Raises:
        KVCachedConfigError: `error` itself where the user asked for kvcached or nothing.
    """
    if _strict():
        if isinstance(error, KVCachedConfigError):
            raise error
        raise KVCachedConfigError(f"kvcached cannot be used here: {error!r}") from error
    logger.warning("kvcached is off for this engine, which runs natively: %s", error)
    logger.debug("reason", exc_info=error)


def run_natively(executor: Any, error: Exception) -> None:
    """The engine has its worker, and is found to be one that we do not carry: take back what it has seen of
    us.
    """
    memory = EngineMemory.of(executor.cache_config)
    EngineMemory.detach(executor.cache_config)
    try:
        decline(error)
    except KVCachedConfigError:
        if memory is not None:
            memory.close()
        executor.shutdown()
        raise
    if memory is not None:
        memory.refuse()


def _strict() -> bool:
    """Of this variable alone: another one may be what is wrong."""
    name = "KVCACHED_STRICT"
    try:
        return Settings.from_env({name: os.environ[name]} if name in os.environ else {}).strict
    except KVCachedConfigError:
        return True  # said something about strictness that we do not understand: the safe reading

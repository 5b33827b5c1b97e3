"""A vLLM engine that turned out to be one that we do not carry."""

from __future__ import annotations

from typing import Any

from kvcached.errors import KVCachedConfigError
from kvcached.integration.memory import EngineMemory
from kvcached.integration.refusal import decline

__all__ = ["run_natively"]


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

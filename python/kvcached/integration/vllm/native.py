"""A vLLM engine that turned out to be one that we do not carry."""

from __future__ import annotations

from typing import Any

from kvcached.errors import KVCachedConfigError
from kvcached.integration.memory import EngineMemory
from kvcached.integration.rank import RankMemory
from kvcached.integration.refusal import decline
from kvcached.integration.vllm import ranks

__all__ = ["run_natively"]


def run_natively(executor: Any, error: Exception) -> None:
    """The engine has its workers, and is found to be one that we do not carry: take back what they have seen of
    us.

    Raises:
        KVCachedConfigError: `error`, where the user asked for kvcached or nothing; the workers have ended then.
    """
    memory = EngineMemory.of(executor.cache_config)
    EngineMemory.detach(executor.cache_config)
    try:
        decline(error)
    except KVCachedConfigError:
        executor.shutdown()
        if memory is not None:
            memory.close()
        raise
    if memory is not None:
        memory.close()
        ranks.ask(executor, ranks.refuse)
        RankMemory.detach(executor.cache_config)

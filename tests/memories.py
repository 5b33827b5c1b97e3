"""An engine's memory for tests that have no engine: both halves in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.integration.launch import Launch
from kvcached.integration.memory import EngineMemory
from kvcached.integration.rank import RankMemory

if TYPE_CHECKING:
    from kvcached.integration.plan import Agreement


def local_memory(settings: Any, engine: str = "test") -> EngineMemory:
    """Of an engine that has agreed on nothing yet."""
    launch = Launch(settings, engine, "test")
    return EngineMemory(launch, RankMemory(launch))


def reserved_memory(
    settings: Any, agreement: Agreement, engine: str = "test", device: str = "cpu"
) -> EngineMemory:
    """Of an engine whose KV cache is reserved. To be closed."""
    memory = local_memory(settings, engine)
    reserve(memory, agreement, device)
    return memory


def reserve(memory: EngineMemory, agreement: Agreement, device: str = "cpu") -> None:
    """What the seams of an engine do when its KV cache is agreed."""
    rank = rank_of(memory)
    rank.reserve(memory.decide(agreement, [rank.survey(device)]), device)


def rank_of(memory: EngineMemory) -> RankMemory:
    """The rank of an engine that has one, in this process."""
    assert isinstance(memory.ranks, RankMemory)
    return memory.ranks


def attach(memory: EngineMemory, config: Any) -> None:
    """Both halves, as where an engine starts."""
    memory.attach(config)
    rank_of(memory).attach(config)

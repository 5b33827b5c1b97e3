"""What the demo asks of an engine: one interface, one adapter an engine (`demo.engines`)."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from demo.workload import Request

#: Tokens of a prompt and its output together.
MODEL_LEN = {"cpu": 1024, "cuda": 8192}


@dataclass
class Job:
    """What one engine is to do."""

    engine: str  # a key of `demo.engines.ENGINES`
    model_folder: str
    model_size: str
    device: str  # "cpu" or "cuda"
    prefix_caching: bool
    bursts: int
    requests: int
    pause_s: float
    memory_fraction: float = 0.25  # of the GPU, weights included

    def to_json(self) -> str:
        """The job as one argument."""
        return json.dumps(asdict(self))


def dtype_of(device: str) -> str:
    """float32 on a CPU, where tokens must be exactly equal."""
    return "float32" if device == "cpu" else "bfloat16"


class Engine(ABC):
    """An engine that is running; constructing one starts it.

    The class itself needs no engine to be installed: it is imported where only its title and environment are
    wanted.
    """

    title: ClassVar[str]
    """Its name as people write it."""

    @staticmethod
    @abstractmethod
    def environment(device: str) -> dict[str, str]:
        """Variables that its process needs, beyond those of every engine; what the user has set prevails."""

    @abstractmethod
    def __init__(self, job: Job) -> None:
        """Start it on the job's model, which is in its folder already."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The version of the engine's package."""

    @property
    @abstractmethod
    def kv_cache_bytes(self) -> int:
        """Bytes of KV cache that its scheduler may hand out: what a native engine holds from start to end."""

    @abstractmethod
    def generate(self, requests: list[Request]) -> list[list[int]]:
        """Run the requests as one batch, greedily, each to its full length; the output tokens of each, in order."""

    @abstractmethod
    def forget(self) -> None:
        """Empty the prefix cache."""

    @abstractmethod
    def close(self) -> None:
        """End it and the processes that it started."""

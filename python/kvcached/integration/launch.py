"""One engine's start: what it was started with. Pure data, which goes to the engine's other processes as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.config import Settings

__all__ = ["Launch"]


@dataclass(frozen=True)
class Launch:
    """What holds for all processes of one engine.

    Args:
        settings: as the environment of the process that starts the engine states them.
        engine: "vllm" or "sglang".
        version: of the engine.
    """

    settings: Settings
    engine: str
    version: str

    @property
    def name(self) -> str:
        """The engine and its version, as others see them."""
        return f"{self.engine} {self.version}"

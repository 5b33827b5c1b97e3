"""What was found, one line each, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """`topic`: what was looked at. `advice`: what to do, empty where nothing need be done.

    "problem": an engine that is started here with ENABLE_KVCACHED=true would run natively, or not start.
    """

    level: Level
    topic: str
    text: str
    advice: str = ""

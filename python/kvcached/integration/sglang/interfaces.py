"""For programs that run a scheduler of SGLang in their own process."""

from __future__ import annotations

from kvcached.integration.interfaces import observability_snapshot, shutdown_kvcached
from kvcached.integration.sglang.plugin import install

__all__ = ["install", "observability_snapshot", "shutdown_kvcached"]

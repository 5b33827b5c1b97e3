"""For programs that run vLLM in their own process."""

from __future__ import annotations

from kvcached.integration.interfaces import observability_snapshot, shutdown_kvcached
from kvcached.integration.vllm.plugin import install

__all__ = ["install", "observability_snapshot", "shutdown_kvcached"]

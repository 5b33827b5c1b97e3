"""For programs that run engines in their own process: what they hold, and an end to it.

Nothing here has to be called: `ENABLE_KVCACHED=true` is all that an engine needs. Each engine's folder offers
these under the name `interfaces` too.
"""

from __future__ import annotations

from typing import Any

from kvcached.integration.memory import EngineMemory

__all__ = ["observability_snapshot", "shutdown_kvcached"]


def observability_snapshot() -> list[dict[str, Any]]:
    """Each elastic engine of this process.

    Returns:
        "engine" (name and version), "device" (of all ranks), "num_buffers" of a rank, and the numbers of
        `kvcached._core.Pool.stats`: pages by state, blocks, bytes of one rank. Engines that have no scheduler yet are left out.
    """
    return [
        {
            "engine": memory.launch.name,
            "device": memory.devices,
            "num_buffers": memory.pool.geometry.num_buffers,
            **memory.pool.stats(),
        }
        for memory in EngineMemory.live()
        if memory.pool is not None
    ]


def shutdown_kvcached() -> None:
    """Give back all memory of this process's engines, which must not run any more. Idempotent."""
    for memory in EngineMemory.live():
        memory.close()

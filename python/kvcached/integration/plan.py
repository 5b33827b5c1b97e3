"""How an engine's KV cache lies in memory: agreed by the engine, fitted to the devices, the same on every rank. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.instance import Hardware
    from kvcached.integration.kernels import Ground

__all__ = ["Agreement", "Plan", "Survey", "devices_shown"]


@dataclass(frozen=True)
class Agreement:
    """What an engine's KV cache comes to on each rank: one group of buffers, all with blocks of one size.

    Args:
        buffers: their names in the engine's words, in the order of their chunks in a page.
        block_bytes: bytes of one block in one buffer.
        tokens_per_block: tokens of a block.
        num_blocks: usable blocks, the null block included.
    """

    buffers: tuple[str, ...]
    block_bytes: int
    tokens_per_block: int
    num_blocks: int


@dataclass(frozen=True)
class Survey:
    """What one rank's device asks for.

    Args:
        device: "cuda:N" or "cpu".
        granularity: smallest physical allocation there, bytes.
        ground: what the rank's attention kernels were shown to bear there.
        hardware: which device that is, whatever process looks at it.
    """

    device: str
    granularity: int
    ground: Ground
    hardware: Hardware


@dataclass(frozen=True)
class Plan:
    """What every rank reserves. Ranks that solve it get the same geometry, and with it the same ids.

    Args:
        agreement: what the engine laid out.
        ground: layout and unbacked memory that all ranks bear.
        granularity: of the coarsest device, bytes.
        page_bytes: size of a page to aim at, None to have it chosen.
    """

    agreement: Agreement
    ground: Ground
    granularity: int
    page_bytes: int | None

    def geometry(self) -> _core.Geometry:
        """Solve it.

        Raises:
            GeometryError: no page fits, or ids would pass 2^31.
        """
        agreement = self.agreement
        return _core.Geometry.solve(
            len(agreement.buffers),
            agreement.block_bytes,
            self.granularity,
            page_bytes=self.page_bytes,
            tokens_per_block=agreement.tokens_per_block,
            layout=self.ground.layout,
            num_blocks=agreement.num_blocks,
        )


def devices_shown(devices: Sequence[str]) -> str:
    """The devices of all ranks as one short text: "cuda:0", "cuda:0,1", "cpu x2"."""
    if len(devices) == 1:
        return devices[0]
    kinds, _, _ = zip(*(device.partition(":") for device in devices), strict=True)
    indices = [device.partition(":")[2] for device in devices]
    text = f"{kinds[0]}:{','.join(indices)}"
    if all(indices) and len(set(kinds)) == 1 and len(text) <= MAX_SHOWN:
        return text
    return f"{kinds[0]} x{len(devices)}"


MAX_SHOWN = 64
"""An instance record holds that many bytes of it."""

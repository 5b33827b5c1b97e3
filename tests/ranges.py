"""Ranges of addresses for tests, and what views of them must look like, by the definition of the layouts.

A failed assertion shows every value that it names: one of a whole tensor over holes would read them, and end the run. So what
is compared of such a tensor is taken from it before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached import _core
from kvcached._core import FTensor, Geometry

if TYPE_CHECKING:
    from kvcached._core import Buffer, Pool

KIB, MIB = 1 << 10, 1 << 20
LAYOUTS = ["chunked", "per-layer"]
GRANULARITY = _core.granularity("cpu")


def host_range(layout: str = "chunked", *, num_blocks: int = 50, buffers: int = 4, **options: Any) -> FTensor:
    """On the host: blocks of 4 KiB in pages of 64 KiB, 4 of them in each of 4 buffers."""
    geometry = Geometry.solve(buffers, 4 * KIB, GRANULARITY, page_bytes=64 * KIB, layout=layout)
    return FTensor("cpu", geometry, num_blocks, **options)


def settled_pages(pool: Pool) -> list[int]:
    """Pages with memory, once the pool's own thread has given back and backed what it wants to."""
    assert pool.quiesce()
    return pool.ftensor.mapped_pages()


def buffer_stride(ftensor: FTensor) -> int:
    """Bytes from one buffer to the next, by the layout's definition."""
    geometry = ftensor.geometry
    if geometry.layout == "chunked":
        return geometry.blocks_per_page * geometry.block_bytes
    return ftensor.num_pages * geometry.blocks_per_page * geometry.block_bytes


def views_of(ftensor: FTensor) -> list[tuple[Buffer, tuple[int, ...], tuple[int, ...], int]]:
    """Every kind of view with the shape, the strides and the offset from the first buffer that it must have."""
    geometry, ids = ftensor.geometry, ftensor.id_space
    block, stride = geometry.block_bytes, buffer_stride(ftensor)
    expected = [
        (buffer, (ids * block,), (1,), number * stride) for number, buffer in enumerate(ftensor.buffers())
    ]
    for number in range(geometry.num_buffers):
        for offset, nbytes in ((0, block), (0, 7), (100, 1000), (block - 1, 1)):
            view = ftensor.component(number, offset, nbytes)
            expected.append((view, (ids, nbytes), (block, 1), number * stride + offset))
    for number in range(geometry.num_buffers - 1):
        expected.append((ftensor.halves(number), (2, ids * block), (stride, 1), number * stride))
    return expected


class Legacy:
    """An exporter of before DLPack 1.0: its consumer cannot name a version."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.buffer.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()


class Same:
    """Gives every consumer the same capsule."""

    def __init__(self, buffer: Buffer, version: tuple[int, int] | None) -> None:
        self.buffer, self.capsule = buffer, buffer.__dlpack__(max_version=version)

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()

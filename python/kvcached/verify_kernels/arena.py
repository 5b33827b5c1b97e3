"""The memory that a backend is run over: sparse tensors as kvcached makes them, and the same data in dense ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvcached import _core

if TYPE_CHECKING:
    from kvcached.verify_kernels.cases import Shape

__all__ = ["Arena", "highest_ids", "holes"]

GIB = 1 << 30
MIB = 1 << 20

#: Addresses of the id space under `highest_ids`: at least a whole H200's.
LEAST_ADDRESS_BYTES = 128 * GIB
#: In-buffer offsets, bytes, at which 32-bit arithmetic goes wrong: bytes, or elements of 2 or 4 bytes, signed or not.
ANCHORS = tuple(1 << power for power in range(31, 37))
#: Buffers of the group under `highest_ids`: so many layers, or half as many with K and V apart.
TOP_BUFFERS = 4
TOP_PAGE_BYTES = 2 * MIB
#: Pages that have memory, at least: with holes between them.
LEAST_BACKED_PAGES = 12


@dataclass(frozen=True)
class _Run:
    """`count` blocks that lie side by side: the first one's id, and its ordinal."""

    first_id: int
    first: int
    count: int


@dataclass
class Arena:
    """One layer or several, each of one buffer or of two, in two copies.

    `ids[n]` is the sparse id of ordinal n; in the dense tensors the ordinal is the id.

    Args:
        sparse, dense: of each layer its buffers, flat int8 tensors of `id_space` and of `len(ids)` blocks.
        stale_ids: ids to put where a kernel must not look. favoured: ordinals to end sequences with.
        address_bytes: of the whole range.
    """

    block_bytes: int
    id_space: int
    address_bytes: int
    ids: list[int]
    stale_ids: list[int]
    favoured: list[int]
    runs: list[_Run]
    sparse: list[list[Any]]
    dense: list[list[Any]]

    def fill(self, dtype: str, seed: int) -> None:
        """Random numbers into every block that has memory, the same in both copies."""
        kind = getattr(torch, dtype)
        for layer, buffers in enumerate(self.dense):
            for i, buffer in enumerate(buffers):
                generator = torch.Generator(buffer.device).manual_seed(seed + 2 * layer + i)
                buffer.view(kind).normal_(generator=generator)
        for into, out_of in self._runs():
            into.copy_(out_of)

    def copies_differ(self) -> bool:
        """Whether a block with memory holds something else than its twin."""
        return not all(torch.equal(sparse, dense) for sparse, dense in self._runs())

    def close(self) -> None:
        """Let go of the tensors; the memory goes with the last view of them."""
        self.sparse, self.dense = [], []

    def _runs(self) -> list[tuple[Any, Any]]:
        """Of each run of blocks in each buffer the sparse bytes and the dense ones."""
        size = self.block_bytes
        return [
            (
                sparse[run.first_id * size : (run.first_id + run.count) * size],
                dense[run.first * size : (run.first + run.count) * size],
            )
            for layers in zip(self.sparse, self.dense, strict=True)
            for sparse, dense in zip(*layers, strict=True)
            for run in self.runs
        ]


def holes(device: str, shape: Shape, block_bytes: int, buffers_per_layer: int, usable: int) -> Arena:
    """One layer whose pages lie between holes, as few blocks in a page as the device allows.

    A buffer has a range of its own: what lies before and behind a page of it is a hole, not another buffer's chunk. Stale ids
    point into holes, and sequences end at the last row before one.

    Args:
        device: "cuda:N" or "cpu". block_bytes: of a block in one buffer. usable: blocks that must have memory, at least.
    """
    granularity = _core.granularity(device)
    geometry = _core.Geometry.solve(
        1, block_bytes, granularity, page_bytes=granularity, tokens_per_block=shape.block_tokens
    )
    backed_pages = max(LEAST_BACKED_PAGES, -(-usable // geometry.blocks_per_page))
    rng = random.Random(block_bytes)
    backed, page = [0], 1  # page 0 holds the null block, which kvcached always backs
    while len(backed) < backed_pages:
        page += rng.choice((1, 1, 2))
        run = rng.choice((1, 1, 2, 3))
        backed += range(page, page + run)
        page += run
    num_pages = page  # the last row of all has memory
    ranges = [
        _core.FTensor(device, geometry, num_pages * geometry.blocks_per_page, unbacked="hole")
        for _ in range(buffers_per_layer)
    ]
    for ftensor in ranges:
        ftensor.map(backed)
    sparse = [[_tensor(ftensor.buffers()[0]) for ftensor in ranges]]
    arena = _arena(device, geometry, ranges[0], backed, sparse)
    unbacked = sorted(set(range(num_pages)) - set(backed))
    arena.stale_ids = [
        page * geometry.ids_per_page + row
        for page in unbacked
        for row in {0, geometry.blocks_per_page // 2, geometry.blocks_per_page - 1}
    ]
    before_a_hole = {run.first + run.count - 1 for run in arena.runs}
    after_a_hole = {run.first for run in arena.runs} - {0}
    arena.favoured = sorted(before_a_hole | after_a_hole)
    return arena


def highest_ids(device: str, shape: Shape, block_bytes: int, buffers_per_layer: int, usable: int) -> Arena:
    """The first and the last layer of a chunked group as large as the card: a few pages at the bottom, where 32 bits end, and at the top.

    Stale ids have memory: what they point at is not in question here. Arguments as of `holes`.
    """
    granularity = _core.granularity(device)
    address_bytes = max(LEAST_ADDRESS_BYTES, -(-_core.mem_info(device)[1] // GIB) * GIB)
    if device == "cpu":  # memory of a machine may be terabytes, and is not what the test is about
        address_bytes = LEAST_ADDRESS_BYTES
    geometry = _core.Geometry.solve(
        TOP_BUFFERS,
        block_bytes,
        granularity,
        page_bytes=max(TOP_PAGE_BYTES, TOP_BUFFERS * block_bytes),
        tokens_per_block=shape.block_tokens,
    )
    num_pages = address_bytes // geometry.page_bytes
    backed = _around_anchors(
        num_pages, geometry.page_bytes, max(LEAST_BACKED_PAGES, -(-usable // geometry.blocks_per_page))
    )
    ftensor = _core.FTensor(device, geometry, num_pages * geometry.blocks_per_page, unbacked="hole")
    ftensor.map(backed)
    tensors = [_tensor(buffer) for buffer in ftensor.buffers()]
    sparse = [tensors[:buffers_per_layer], tensors[-buffers_per_layer:]]
    arena = _arena(device, geometry, ftensor, backed, sparse)
    arena.stale_ids = arena.ids[1:]
    arena.favoured = list(range(len(arena.ids) - 2 * geometry.blocks_per_page, len(arena.ids)))
    return arena


def _around_anchors(num_pages: int, page_bytes: int, wanted: int) -> list[int]:
    """Pages on both sides of each anchor, at the bottom and at the top, nearest first, until there are `wanted` of them."""
    centres = [anchor // page_bytes for anchor in ANCHORS]
    chosen: set[int] = set()
    reach = 0
    while len(chosen) < wanted or reach < 2:
        reach += 1
        near = {page for centre in centres for page in (centre - reach, centre + reach - 1)}
        chosen |= {page for page in near | {reach - 1, num_pages - reach} if 0 <= page < num_pages}
    return sorted(chosen)


def _arena(
    device: str, geometry: _core.Geometry, ftensor: _core.FTensor, backed: list[int], sparse: list[list[Any]]
) -> Arena:
    """With everything but the stale and the favoured ids."""
    per_page, stride = geometry.blocks_per_page, geometry.ids_per_page
    ids = [page * stride + row for page in backed for row in range(per_page)]
    runs: list[_Run] = []
    for ordinal, block_id in enumerate(ids):
        if runs and runs[-1].first_id + runs[-1].count == block_id:
            runs[-1] = _Run(runs[-1].first_id, runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(_Run(block_id, ordinal, 1))
    dense = [
        [torch.zeros(len(ids) * geometry.block_bytes, dtype=torch.int8, device=device) for _ in buffers]
        for buffers in sparse
    ]
    return Arena(
        block_bytes=geometry.block_bytes,
        id_space=ftensor.id_space,
        address_bytes=ftensor.virtual_bytes,
        ids=ids,
        stale_ids=[],
        favoured=[],
        runs=runs,
        sparse=sparse,
        dense=dense,
    )


def _tensor(buffer: _core.Buffer) -> Any:
    return torch.from_dlpack(buffer)

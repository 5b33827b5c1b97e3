"""Attention in plain torch, rightly and wrongly: proof that the verdicts can fail.

No engine has these. `correct` must pass both proofs; the others each fail the one that their fault belongs to, on a CPU and on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvcached
from kvcached.verify_kernels.cases import Shape
from kvcached.verify_kernels.outcome import CONTROLS
from kvcached.verify_kernels.subject import UntestedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.verify_kernels.subject import Inputs

__all__ = ["Control"]


class Control:
    """One of `CONTROLS`."""

    engine = "control"
    buffers_per_layer = 1

    def __init__(self, backend: str, device: str) -> None:
        if backend not in CONTROLS:
            raise UntestedError(f"no such control: {', '.join(CONTROLS)}")
        self.version = kvcached.__version__
        self.notes: list[str] = []
        self.backend = backend
        self.device = device

    def shapes(self, *, quick: bool) -> list[Shape]:
        """One of many small blocks, and one of large ones."""
        small = Shape(block_tokens=16, num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
        large = Shape(block_tokens=128, num_heads=2, num_kv_heads=1, head_size=64, dtype="float32")
        return [small] if quick else [small, large]

    def block_bytes(self, shape: Shape) -> int:
        """K and V side by side."""
        return shape.block_tokens * shape.num_kv_heads * 2 * shape.head_size * 4

    def open(self, shape: Shape, layers: Sequence[Sequence[Any]], num_rows: int) -> _Opened:
        """See `Subject.open`."""
        caches = [buffer.view(torch.float32).view(num_rows, -1) for (buffer,) in layers]
        return _Opened(caches, _READERS[self.backend])


class _Opened:
    def __init__(self, caches: list[Any], read: Callable[..., Any]) -> None:
        self._caches = caches
        self._read = read

    def run(self, layer: int, inputs: Inputs) -> Any:
        """See `Opened.run`. A request at a time."""
        cache, shape, batch = self._caches[layer], inputs.batch.shape, inputs.batch
        rows = cache.view(cache.shape[0], shape.block_tokens, shape.num_kv_heads, 2 * shape.head_size)
        slots = inputs.slots[inputs.slots >= 0]
        new = torch.cat((inputs.key, inputs.value), dim=-1)[: len(slots)]
        rows[slots // shape.block_tokens, slots % shape.block_tokens] = new
        out = torch.zeros_like(inputs.query)
        start = 0
        for row, request in enumerate(batch.requests):
            end = start + request.query_tokens
            blocks = self._read(cache, inputs.block_table[row], len(request.blocks))
            tokens = blocks.reshape(-1, shape.num_kv_heads, 2 * shape.head_size)[: request.seq_tokens]
            out[start:end] = _attend(inputs.query[start:end], *tokens.split(shape.head_size, dim=-1))
            start = end
        return out.flatten(1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """See `Opened.copy_blocks`."""
        for cache in self._caches:
            sources, targets = torch.tensor(pairs, device=cache.device).T
            cache[targets] = cache[sources]
        return True

    def wrong_with_ids(self, ids: Sequence[int]) -> list[str]:
        """See `Opened.wrong_with_ids`: there are none."""
        return []


def _attend(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of the last tokens of a sequence over all of it, [tokens, heads, head size]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    positions = torch.arange(key.shape[0], device=key.device)
    hidden = positions[None, :] > positions[-len(query) :, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def _correct(cache: Any, table: Any, count: int) -> Any:
    return cache[table[:count]]


def _stale_entries(cache: Any, table: Any, count: int) -> Any:
    """Every column of the table, to forget what is too much afterwards."""
    return cache[table][:count]


def _one_block_more(cache: Any, table: Any, count: int) -> Any:
    """The row behind the last block too, as a prefetch would."""
    behind = (table[count - 1] + 1).clamp(max=cache.shape[0] - 1)
    return cache[torch.cat((table[:count], behind[None]))][:count]


def _in_32_bits(cache: Any, table: Any, count: int) -> Any:
    """Offsets in bytes as an unsigned 32-bit number holds them."""
    row_elements = cache.shape[1]
    row_bytes = row_elements * cache.element_size()
    offsets = (table[:count].to(torch.int64) * row_bytes) & 0xFFFFFFFF
    columns = torch.arange(row_elements, device=cache.device)
    return cache.view(-1)[(offsets // cache.element_size())[:, None] + columns]


_READERS = {
    "correct": _correct,
    "reads_stale_entries": _stale_entries,
    "reads_one_block_more": _one_block_more,
    "offsets_in_32_bits": _in_32_bits,
}

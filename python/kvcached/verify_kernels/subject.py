"""What an engine's backend must offer to be tested, and what a test gives it. One file an engine implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.verify_kernels.cases import Batch, Shape

__all__ = ["Inputs", "Opened", "Subject", "UntestedError"]


class UntestedError(Exception):
    """The backend cannot run here; the message says why. It has neither passed nor failed."""


@dataclass(frozen=True)
class Inputs:
    """One batch as tensors on the device, its blocks by the ids of one set of tensors.

    T tokens (padding included), R requests (padding included), W columns, b tokens a block.

    Args:
        batch: what it was made from.
        query: [T, heads, head size]. key, value: [T, KV heads, head size], to be stored.
        block_table: int32 [R, W]. Columns past a request's blocks, and rows of padding, are stale.
        slots: int64 [T], id x b + offset of each token; -1 for padding.
        query_start: int32 [R + 1], first token of each request. seq_lens: int32 [R], 0 for padding.
    """

    batch: Batch
    query: Any
    key: Any
    value: Any
    block_table: Any
    slots: Any
    query_start: Any
    seq_lens: Any

    @property
    def max_query_tokens(self) -> int:
        """Of one request."""
        return max(request.query_tokens for request in self.batch.requests)


class Opened(Protocol):
    """A backend over one set of KV cache tensors."""

    def run(self, layer: int, inputs: Inputs) -> Any:
        """Store the batch's keys and values in this layer's cache and attend over it, as the engine does.

        Returns the output, [T, heads x head size].
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Copy blocks (from id, to id) in every layer, as the engine does; False where it has no such operation."""

    def wrong_with_ids(self, ids: Sequence[int]) -> list[str]:
        """Which other kernels of the engine make something else of these block ids than they should, for example those that
        give them out. At least nine ids, all with memory.
        """


class Subject(Protocol):
    """One backend of one engine, in this process.

    Making one raises `UntestedError` where it cannot run here.
    """

    engine: str
    version: str
    backend: str  # as records name it
    buffers_per_layer: int  # 1: K and V together, 2: apart
    notes: list[str]  # what a record should say of how it ran, once it ran

    def shapes(self, *, quick: bool) -> list[Shape]:
        """Those to test, all of which the backend takes."""

    def block_bytes(self, shape: Shape) -> int:
        """Of one block in one buffer."""

    def open(self, shape: Shape, layers: Sequence[Sequence[Any]], num_rows: int) -> Opened:
        """Over tensors as kvcached exports them.

        Args:
            shape: one of `shapes`.
            layers: of each layer its buffers, flat int8 tensors of `num_rows` blocks.
            num_rows: bound of block ids.
        """

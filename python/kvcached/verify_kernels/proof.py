"""Both proofs for one backend, in the process that runs it.

A row without memory cannot be touched and survived: the process dies, or its GPU context does. So every batch is announced before it
runs, and whoever started this process reads the announcements afterwards.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from kvcached.verify_kernels import arena as arenas
from kvcached.verify_kernels.cases import batches, blocks_needed
from kvcached.verify_kernels.outcome import HOLES, TOP_IDS
from kvcached.verify_kernels.subject import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.verify_kernels.arena import Arena
    from kvcached.verify_kernels.cases import Batch
    from kvcached.verify_kernels.subject import Opened, Subject

__all__ = ["prove"]

#: Over which memory each phase runs.
ARENAS = {HOLES: arenas.holes, TOP_IDS: arenas.highest_ids}
#: How often each kind of batch is drawn.
ROUNDS = {False: 2, True: 1}  # by quick
COPIES = 6


def prove(subject: Subject, device: str, phase: str, quick: bool, report: Callable[..., None]) -> None:
    """Run one phase and report every step of it.

    Args:
        device: "cuda:N" or "cpu". phase: one of `PHASES`.
        report: called with `case=name` before a batch, `differs=what` for each that gave other bits over sparse tensors than over dense
            ones, and `cases=count, address_bytes=...` at the end.
    """
    count = address_bytes = 0
    for shape in subject.shapes(quick=quick):
        usable = blocks_needed(shape, quick=quick, rounds=ROUNDS[quick])
        arena = ARENAS[phase](device, shape, subject.block_bytes(shape), subject.buffers_per_layer, usable)
        arena.fill(shape.dtype, seed=count)
        address_bytes = max(address_bytes, arena.address_bytes)
        sparse = subject.open(shape, arena.sparse, arena.id_space)
        dense = subject.open(shape, arena.dense, len(arena.ids))
        for layer in range(len(arena.sparse)):
            for batch in batches(shape, len(arena.ids), arena.favoured, quick=quick, rounds=ROUNDS[quick]):
                report(case=batch.name)
                count += 1
                for what in _differences(layer, batch, arena, sparse, dense, device):
                    report(differs=f"{batch.name}: {what}")
        report(case=f"block copy, {shape}")
        count += _copied(arena, sparse, dense, device, report)
        report(case=f"ids, {shape}")
        for what in sparse.wrong_with_ids(arena.ids):
            report(differs=f"{what}, {shape}")
        arena.close()
        del sparse, dense
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    report(cases=count, address_bytes=address_bytes)


def _differences(
    layer: int, batch: Batch, arena: Arena, sparse: Opened, dense: Opened, device: str
) -> list[str]:
    """Run a batch over both copies; what differs then."""
    over_sparse = _inputs(batch, arena.ids, arena.stale_ids, device)
    over_dense = _inputs(batch, range(len(arena.ids)), [0], device)
    out = sparse.run(layer, over_sparse)
    synchronise(device)  # so that a fault belongs to the batch that was announced
    expected = dense.run(layer, over_dense)
    synchronise(device)
    tokens, found = batch.query_tokens, []
    if not _same_bits(out[:tokens], expected[:tokens]):
        again = dense.run(layer, over_dense)
        if _same_bits(expected[:tokens], again[:tokens]):
            found.append(f"output, by up to {_distance(out[:tokens], expected[:tokens])}")
        elif not torch.allclose(out[:tokens], expected[:tokens], rtol=2e-2, atol=2e-2):
            found.append("output, of a kernel that does not repeat itself, by more than rounding")
    if arena.copies_differ():
        found.append("what was stored")
    return found


def _copied(arena: Arena, sparse: Opened, dense: Opened, device: str, report: Callable[..., None]) -> int:
    """The engine's block copy, where it has one: cases run."""
    last = len(arena.ids) - 1
    pairs = [(last - i, 1 + i) if i % 2 else (1 + i, last - i) for i in range(COPIES)]
    if not sparse.copy_blocks([(arena.ids[a], arena.ids[b]) for a, b in pairs]):
        return 0
    dense.copy_blocks(pairs)
    synchronise(device)
    if arena.copies_differ():
        report(differs="block copy")
    return 1


def _inputs(batch: Batch, ids: Sequence[int], stale_ids: Sequence[int], device: str) -> Inputs:
    """The batch's tensors, its blocks by `ids`. The same keys, values and queries on every call."""
    shape, requests, padding = batch.shape, batch.requests, batch.padding
    block = shape.block_tokens
    rows = len(requests) + padding
    # Stale everywhere, each cell with another id than its neighbours, then what the requests have.
    cells = batch.seed + 31 * torch.arange(rows)[:, None] + torch.arange(batch.table_width)
    table = torch.tensor(stale_ids, dtype=torch.int32)[cells % len(stale_ids)]
    slots: list[int] = []
    for row, request in enumerate(requests):
        own = [ids[ordinal] for ordinal in request.blocks]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        slots += [
            own[position // block] * block + position % block
            for position in range(request.context_tokens, request.seq_tokens)
        ]
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.query_tokens)
    tokens = len(slots) + padding
    generator = torch.Generator(device).manual_seed(batch.seed)

    def random(heads: int) -> Any:
        size, dtype = (tokens, heads, shape.head_size), getattr(torch, shape.dtype)
        made = torch.randn(size, generator=generator, device=device, dtype=dtype)
        made[len(slots) :] = 0  # SGLang stores those of padding too, all in one row
        return made

    return Inputs(
        batch=batch,
        query=random(shape.num_heads),
        key=random(shape.num_kv_heads),
        value=random(shape.num_kv_heads),
        block_table=table.to(device),
        slots=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device),
        query_start=torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(
            [request.seq_tokens for request in requests] + [0] * padding, dtype=torch.int32, device=device
        ),
    )


def synchronise(device: str) -> None:
    """Wait for the device; a fault of its kernels is raised here."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def _same_bits(one: Any, other: Any) -> bool:
    """Whether two tensors are the same, NaN for NaN."""
    return bool(torch.equal(one.contiguous().view(torch.int8), other.contiguous().view(torch.int8)))


def _distance(one: Any, other: Any) -> str:
    return f"{(one.float() - other.float()).abs().max().item():.3g}"

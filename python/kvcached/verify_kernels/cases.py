"""The batches that a backend is run over: pure, seeded, in the words of an engine's scheduler.

A batch names blocks by *ordinal*: the n-th block that has memory. The sparse tensors and their dense twin give an ordinal
different ids and the same content. Ordinal 0 is the null block, which holds no token of any request.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["MODEL_TOKENS", "Batch", "Request", "Shape", "batches", "blocks_needed"]

#: The longest sequence that a model of these cases takes.
MODEL_TOKENS = 4096
#: Blocks beside those that a batch writes, for the contexts that its requests share.
SHARED_BLOCKS = 12

Lengths = list[tuple[int, int]]  # of each request: query tokens, sequence tokens


@dataclass(frozen=True)
class Shape:
    """One layer's KV cache and the attention over it. `dtype`: "float32", "float16" or "bfloat16"."""

    block_tokens: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        return f"blocks of {self.block_tokens}, {heads}, {self.dtype}"


@dataclass(frozen=True)
class Request:
    """One request's part of a batch: its last `query_tokens` of `seq_tokens` are computed and their K and V stored.

    `blocks`: ordinals of the blocks that hold its sequence, in order. Those that are written belong to it alone; the others
    are shared as a prefix cache shares them.
    """

    query_tokens: int
    seq_tokens: int
    blocks: tuple[int, ...]

    @property
    def context_tokens(self) -> int:
        return self.seq_tokens - self.query_tokens


@dataclass(frozen=True)
class Batch:
    """What an engine would run in one step.

    Args:
        name: for people. shape: of the KV cache. seed: of the tensors' content.
        requests: decodes first, as some backends ask for.
        padding: requests of no tokens at the end, and as many tokens of no request, as a CUDA graph of a fixed size has them.
        table_width: columns of the block table; those past a request's blocks are stale.
        max_seq_tokens: an upper bound of the sequences, as the engine states it.
    """

    name: str
    shape: Shape
    seed: int
    requests: tuple[Request, ...]
    padding: int
    table_width: int
    max_seq_tokens: int

    @property
    def query_tokens(self) -> int:
        """Tokens that are computed, padding not counted."""
        return sum(request.query_tokens for request in self.requests)


@dataclass(frozen=True)
class _Plan:
    """A kind of batch. `bound`: `max_seq_tokens` is the model's, not the batch's."""

    name: str
    lengths: Callable[[random.Random, int], Lengths]
    padded: bool = False
    bound: bool = False
    always: bool = False  # in a quick run too


def _decodes(count: int, longest: int) -> Callable[[random.Random, int], Lengths]:
    return lambda rng, block: [(1, rng.randint(1, longest)) for _ in range(count)]


def _extends(count: int, query: int, longest_context: int) -> Callable[[random.Random, int], Lengths]:
    def lengths(rng: random.Random, block: int) -> Lengths:
        return [(query, query + rng.randint(1, longest_context)) for _ in range(count)]

    return lengths


def _short_decodes(rng: random.Random, block: int) -> Lengths:
    return [(1, max(1, tokens)) for tokens in (1, 2, block - 1, block, block + 1, 2 * block, 3 * block + 1)]


def _one_long(rng: random.Random, block: int) -> Lengths:
    return [(1, rng.randint(3 * MODEL_TOKENS // 4, MODEL_TOKENS))]


def _prefills(rng: random.Random, block: int) -> Lengths:
    lengths = (2, max(1, block - 1), block, block + 1, 2 * block + block // 2)
    return [(tokens, tokens) for tokens in lengths]


def _long_prefill(rng: random.Random, block: int) -> Lengths:
    return [(tokens, tokens) for tokens in (rng.randint(500, 900), rng.randint(64, 200))]


def _mixed(rng: random.Random, block: int) -> Lengths:
    decodes = [(1, rng.randint(1, longest)) for longest in (block, 400, 1500, 300)]
    return [*decodes, (7, 7 + rng.randint(1, 300)), (64, 64 + rng.randint(1, 500)), (90, 90)]


_PLANS = (
    _Plan("decode, short", _short_decodes, always=True),
    _Plan("decode, one long", _one_long, always=True),
    _Plan("decode", _decodes(5, 3000)),
    _Plan("decode, many", _decodes(33, 400), always=True),
    _Plan("decode, padded", _decodes(13, 700), padded=True, always=True),
    _Plan("decode, loose bound", _decodes(4, 300), bound=True),
    _Plan("decode, padded, loose bound", _decodes(3, 90), padded=True, bound=True),
    _Plan("extend by 2", _extends(5, 2, 400)),
    _Plan("extend by 7", _extends(5, 7, 2000), always=True),
    _Plan("chunked prefill", _extends(3, 64, 1500), always=True),
    _Plan("chunked prefill, long", _extends(2, 300, 1500)),
    _Plan("prefill", _prefills, always=True),
    _Plan("prefill, long", _long_prefill),
    _Plan("mixed", _mixed, always=True),
    _Plan("mixed, loose bound", _mixed, bound=True),
)


def batches(
    shape: Shape, usable: int, favoured: Sequence[int], *, quick: bool = False, rounds: int = 1
) -> Iterator[Batch]:
    """The batches for a KV cache of `usable` blocks, the null block among them.

    Args:
        shape: whose `block_tokens` decides how many blocks a request has. usable: at least `blocks_needed(shape)`.
        favoured: ordinals that end sequences, as far as there are enough: those at the edge of the memory, or of the id space.
        quick: fewer kinds. rounds: how often each kind is drawn, differently each time.
    """
    for plan in _PLANS:
        for round_ in range(rounds if plan.always or not quick else 0):
            seed = zlib.crc32(f"{plan.name} {shape} {round_}".encode())
            rng = random.Random(seed)
            lengths = _to_edges(plan.lengths(rng, shape.block_tokens), shape.block_tokens)
            requests = _placed(lengths, shape.block_tokens, usable, favoured, rng)
            longest = max(request.seq_tokens for request in requests)
            bound = MODEL_TOKENS if plan.bound else longest
            yield Batch(
                name=f"{plan.name}, {shape}",
                shape=shape,
                seed=seed,
                requests=requests,
                # CUDA graphs are captured for multiples of 8.
                padding=-len(requests) % 8 if plan.padded else 0,
                table_width=_blocks(MODEL_TOKENS, shape.block_tokens),
                max_seq_tokens=bound,
            )


def blocks_needed(shape: Shape, *, quick: bool = False, rounds: int = 1) -> int:
    """Blocks that `batches` of the same arguments needs, the null block among them."""
    most = 0
    for plan in _PLANS:
        for round_ in range(rounds if plan.always or not quick else 0):
            rng = random.Random(zlib.crc32(f"{plan.name} {shape} {round_}".encode()))
            lengths = _to_edges(plan.lengths(rng, shape.block_tokens), shape.block_tokens)
            most = max(most, sum(_written(*of, shape.block_tokens) for of in lengths))
    return 1 + most + SHARED_BLOCKS


def _to_edges(lengths: Lengths, block: int) -> Lengths:
    """Every third sequence ends exactly at the end of a block."""
    return [
        (query, min(_blocks(seq, block) * block, MODEL_TOKENS) if i % 3 == 0 and query < seq else seq)
        for i, (query, seq) in enumerate(lengths)
    ]


def _placed(
    lengths: Lengths, block: int, usable: int, favoured: Sequence[int], rng: random.Random
) -> tuple[Request, ...]:
    """Blocks for each request: written ones of its own, the last one favoured; contexts from what is left."""
    ends = rng.sample(list(favoured), len(favoured))
    free = rng.sample(range(1, usable), usable - 1)
    taken: set[int] = set()

    def own(wanted: list[int]) -> int:
        while wanted:
            ordinal = wanted.pop()
            if ordinal not in taken:
                taken.add(ordinal)
                return ordinal
        return own(free) if wanted is not free else _short_of_blocks(usable)

    last = [own(ends) for _ in lengths]
    written = [[own(free) for _ in range(_written(*of, block) - 1)] for of in lengths]
    shared = [ordinal for ordinal in range(1, usable) if ordinal not in taken]
    if not shared:
        _short_of_blocks(usable)
    return tuple(
        Request(query, seq, (*rng.choices(shared, k=(seq - query) // block), *middle, end))
        for (query, seq), middle, end in zip(lengths, written, last, strict=True)
    )


def _short_of_blocks(usable: int) -> int:
    raise ValueError(f"{usable} blocks are too few for these batches: see blocks_needed")


def _written(query: int, seq: int, block: int) -> int:
    """Blocks that the query's tokens lie in."""
    return _blocks(seq, block) - (seq - query) // block


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)

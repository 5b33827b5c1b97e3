"""What the tests ask of, or do to, a worker in its own process: functions for vLLM's `collective_rpc`."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from kvcached.integration.rank import RankMemory


def rank_of(worker: Any) -> RankMemory:
    """The elastic memory of a worker that has one."""
    rank = RankMemory.of(worker.vllm_config.cache_config)
    assert rank is not None
    return rank


def is_elastic(worker: Any) -> bool:
    return RankMemory.of(worker.vllm_config.cache_config) is not None


def process_id(worker: Any) -> int:
    return os.getpid()


def address(worker: Any) -> str | None:
    return rank_of(worker).address


def mapped_pages(worker: Any) -> list[int]:
    return rank_of(worker).ftensor.mapped_pages()


def geometry(worker: Any) -> str:
    """All that must be the same on every rank."""
    ftensor = rank_of(worker).ftensor
    return (
        f"{ftensor.geometry.explain()}, {ftensor.num_pages} pages, {ftensor.id_space} ids, {ftensor.unbacked}"
    )


def counts(worker: Any) -> tuple[int, int, int]:
    """Blocks as this worker's scheduler counts them; rows as its runner sees them; rows of its tensors."""
    runner = worker.model_runner
    (nbytes,) = {cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    rank = rank_of(worker)
    return (
        worker.vllm_config.cache_config.num_gpu_blocks,
        runner.kv_cache_config.num_blocks,
        nbytes // rank.plan.agreement.block_bytes,
    )


def lose_pages(worker: Any, number: int) -> None:
    """Rank `number` loses what its pages hold, behind everybody's back."""
    if worker.rank == number:
        ftensor = rank_of(worker).ftensor
        pages = [page for page in ftensor.mapped_pages() if page != 0]
        ftensor.unmap(pages)
        ftensor.map(pages)


def shift_a_layer(worker: Any, number: int) -> None:
    """On rank `number` the third layer lies one block too early, where the second layer's blocks are."""
    if worker.rank != number:
        return
    rank = rank_of(worker)
    name = rank.plan.agreement.buffers[2]
    layer = worker.vllm_config.compilation_config.static_forward_context[name]
    in_list = isinstance(layer.kv_cache, list)
    cache = layer.kv_cache[0] if in_list else layer.kv_cache
    nbytes, block_bytes = cache.untyped_storage().nbytes(), rank.plan.agreement.block_bytes
    raw = torch.frombuffer(
        (ctypes.c_char * nbytes).from_address(cache.data_ptr() - block_bytes), dtype=torch.int8
    )
    shifted = raw.view(cache.dtype).as_strided(cache.shape, cache.stride())
    layer.kv_cache = [shifted] if in_list else shifted

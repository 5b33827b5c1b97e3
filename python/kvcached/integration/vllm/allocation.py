"""The KV cache, from the moment it is agreed to the tensors that the workers view with their own code.

Two counts must never meet. The scheduler plans with `num_blocks`; every tensor has `id_space` rows, and
what a worker derives from a row count (views, copies of blocks) needs that number. So the worker is given a
copy of the KV cache config, and the number that it writes back into the cache config, which it may share with the scheduler, is
put right.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedError
from kvcached.integration.memory import EngineMemory
from kvcached.integration.rank import RankMemory
from kvcached.integration.remote import RemoteRanks
from kvcached.integration.vllm import native, ranks, refusals

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "closed_before_workers",
    "closed_with_executor",
    "kv_cache_views",
    "raw_tensors_v1",
    "raw_tensors_v2",
    "reserved_on_all_ranks",
    "unreachable_with_worker",
    "worker_sees_id_space",
]


def reserved_on_all_ranks(original: Any) -> Any:
    """Replacement of `Executor.initialize_from_config`: the last moment before anything is allocated."""

    @functools.wraps(original)
    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> Any:
        memory = EngineMemory.of(self.cache_config)
        if memory is not None:
            try:
                _reserve(self, memory, kv_cache_configs)
            except KVCachedError as error:
                native.run_natively(self, error)
        return original(self, kv_cache_configs)

    return initialize_from_config


def _reserve(executor: Any, memory: EngineMemory, kv_cache_configs: list[Any]) -> None:
    plan = memory.decide(refusals.agree(kv_cache_configs), ranks.ask(executor, ranks.survey))
    if isinstance(memory.ranks, RemoteRanks):
        memory.ranks.served_at(ranks.ask(executor, ranks.reserve_and_serve, plan))
    else:
        ranks.ask(executor, ranks.reserve, plan)


def worker_sees_id_space(original: Any) -> Any:
    """Replacement of `WorkerWrapperBase.initialize_from_config`, where the worker is."""

    @functools.wraps(original)
    def initialize_from_config(self: Any, kv_cache_configs: Sequence[Any]) -> Any:
        cache_config = self.vllm_config.cache_config
        rank = RankMemory.of(cache_config)
        if rank is None:
            return original(self, kv_cache_configs)
        configs = list(kv_cache_configs)
        config = configs[self.global_rank]
        configs[self.global_rank] = worker_config(config, rank)
        try:
            return original(self, configs)
        finally:
            cache_config.num_gpu_blocks = config.num_blocks

    return initialize_from_config


def worker_config(config: Any, rank: RankMemory) -> Any:
    """The KV cache config that the worker sees: one tensor a layer, each of `id_space` blocks."""
    assert rank.plan is not None
    block_bytes, id_space = rank.plan.agreement.block_bytes, rank.ftensor.id_space
    nbytes = id_space * block_bytes
    tensors = []
    for tensor in config.kv_cache_tensors:
        if hasattr(tensor, "shared_by"):
            tensors.append(dataclasses.replace(tensor, size=nbytes))
            continue
        placed = {"layer_stride": nbytes, "block_stride": block_bytes, "offset": 0}
        tensors += [
            dataclasses.replace(tensor, size=nbytes, layers=[layer], **placed) for layer in tensor.layers
        ]
    changed = dataclasses.replace(config, num_blocks=id_space, kv_cache_tensors=tensors)
    rank.attach(changed)
    return changed


def raw_tensors_v1(original: Any) -> Any:
    """0.26, runner V1: `GPUModelRunner._allocate_kv_cache_tensors`, a flat int8 tensor a layer."""

    @functools.wraps(original)
    def _allocate_kv_cache_tensors(self: Any, kv_cache_config: Any) -> Any:
        rank = RankMemory.of(kv_cache_config)
        if rank is None:  # profiling allocates a small cache of its own
            return original(self, kv_cache_config)
        return rank.tensors()

    return _allocate_kv_cache_tensors


def raw_tensors_v2(original: Any) -> Any:
    """0.26, runner V2: `attn_utils._allocate_kv_cache`, the same contract."""

    @functools.wraps(original)
    def _allocate_kv_cache(kv_cache_config: Any, shared_layers: dict[str, str], device: Any) -> Any:
        rank = RankMemory.of(kv_cache_config)
        if rank is None:
            return original(kv_cache_config, shared_layers, device)
        return rank.tensors()

    return _allocate_kv_cache


def kv_cache_views(original: Any) -> Any:
    """0.29, both runners: `allocate_kv_cache`, which also builds the views; vLLM's own function builds
    ours.
    """

    @functools.wraps(original)
    def allocate_kv_cache(
        kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> Any:
        rank = RankMemory.of(kv_cache_config)
        if rank is None:
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        from vllm.v1.kv_cache_interface import create_kv_cache_views

        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        views, raw = {}, rank.tensors()
        for tensor in kv_cache_config.kv_cache_tensors:
            (layer,) = tensor.layers
            (views[layer],) = create_kv_cache_views(
                raw[layer],
                spec,
                kv_cache_config.num_blocks,
                layout,
                tensor,
                kernel_block_size=kernel_block_sizes[0] if kernel_block_sizes else None,
            )
        return views

    return allocate_kv_cache


def closed_with_executor(original: Any) -> Any:
    """Replacement of `UniProcExecutor.shutdown`: the worker has stopped, nothing reads the KV cache any
    more.
    """

    @functools.wraps(original)
    def shutdown(self: Any) -> Any:
        try:
            return original(self)
        finally:
            memory = EngineMemory.of(self.cache_config)
            if memory is not None:
                memory.close()

    return shutdown


def closed_before_workers(original: Any) -> Any:
    """Replacement of `MultiprocExecutor.shutdown`, also called when a worker has died: the workers give the memory back and then end."""

    @functools.wraps(original)
    def shutdown(self: Any) -> Any:
        memory = EngineMemory.of(self.cache_config)
        if memory is not None:
            memory.close()
        return original(self)

    return shutdown


def unreachable_with_worker(original: Any) -> Any:
    """Replacement of `WorkerWrapperBase.shutdown`, which a worker process calls on every way out but that of a kill: at the end of its engine,
    when the engine's process has died, after a signal or an error of its own.
    """

    @functools.wraps(original)
    def shutdown(self: Any) -> Any:
        rank = RankMemory.of(self.vllm_config.cache_config)
        if rank is not None:
            rank.stop_serving()  # first: what follows may wait for ranks that have died
        return original(self)

    return shutdown

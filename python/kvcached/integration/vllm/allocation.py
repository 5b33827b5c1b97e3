"""The worker's side: it sees the id space where the scheduler counts blocks, and views our memory with its
own code.

Two counts must never meet. The scheduler plans with `num_blocks`; every tensor has `id_space` rows, and
what a worker derives from a row count (views, copies of blocks) needs that number. So the worker is given a
copy of the KV cache config, and the number that it writes back into the shared cache config is put right.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from kvcached.errors import KVCachedError
from kvcached.integration.memory import EngineMemory
from kvcached.integration.vllm import native, refusals

__all__ = [
    "closed_with_executor",
    "kv_cache_views",
    "raw_tensors_v1",
    "raw_tensors_v2",
    "worker_sees_id_space",
]


def worker_sees_id_space(original: Any) -> Any:
    """Replacement of `Executor.initialize_from_config`: the last moment before anything is allocated."""

    @functools.wraps(original)
    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> Any:
        memory = EngineMemory.of(self.cache_config)
        if memory is None:
            return original(self, kv_cache_configs)
        try:
            (config,) = kv_cache_configs
            memory.reserve(refusals.agree(config), str(self.driver_worker.worker.device))
        except KVCachedError as error:
            native.run_natively(self, error)
            return original(self, kv_cache_configs)
        try:
            return original(self, [worker_config(config, memory)])
        finally:
            # The worker shares this object with the scheduler and has written its own number there.
            self.cache_config.num_gpu_blocks = config.num_blocks

    return initialize_from_config


def worker_config(config: Any, memory: EngineMemory) -> Any:
    """The KV cache config that the worker sees: one tensor a layer, each of `id_space` blocks."""
    agreement, id_space = memory.agreement, memory.ftensor.id_space
    assert agreement is not None
    nbytes = id_space * agreement.block_bytes
    tensors = []
    for tensor in config.kv_cache_tensors:
        if hasattr(tensor, "shared_by"):
            tensors.append(dataclasses.replace(tensor, size=nbytes))
            continue
        placed = {"layer_stride": nbytes, "block_stride": agreement.block_bytes, "offset": 0}
        tensors += [
            dataclasses.replace(tensor, size=nbytes, layers=[layer], **placed) for layer in tensor.layers
        ]
    changed = dataclasses.replace(config, num_blocks=id_space, kv_cache_tensors=tensors)
    memory.attach(changed)
    return changed


def raw_tensors_v1(original: Any) -> Any:
    """0.26, runner V1: `GPUModelRunner._allocate_kv_cache_tensors`, a flat int8 tensor a layer."""

    @functools.wraps(original)
    def _allocate_kv_cache_tensors(self: Any, kv_cache_config: Any) -> Any:
        memory = EngineMemory.of(kv_cache_config)
        if memory is None:  # profiling allocates a small cache of its own
            return original(self, kv_cache_config)
        return memory.tensors()

    return _allocate_kv_cache_tensors


def raw_tensors_v2(original: Any) -> Any:
    """0.26, runner V2: `attn_utils._allocate_kv_cache`, the same contract."""

    @functools.wraps(original)
    def _allocate_kv_cache(kv_cache_config: Any, shared_layers: dict[str, str], device: Any) -> Any:
        memory = EngineMemory.of(kv_cache_config)
        if memory is None:
            return original(kv_cache_config, shared_layers, device)
        return memory.tensors()

    return _allocate_kv_cache


def kv_cache_views(original: Any) -> Any:
    """0.29, both runners: `allocate_kv_cache`, which also builds the views; vLLM's own function builds
    ours.
    """

    @functools.wraps(original)
    def allocate_kv_cache(
        kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> Any:
        memory = EngineMemory.of(kv_cache_config)
        if memory is None:
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        from vllm.v1.kv_cache_interface import create_kv_cache_views

        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        views, raw = {}, memory.tensors()
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

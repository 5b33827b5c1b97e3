"""Which engines kvcached carries, and which it refuses by name. Nothing here changes anything.

Asked at three moments, each as early as the answer is known: before the workers exist (`check_engine`),
when the model is loaded and nothing has been profiled yet (`check_model`, in each worker, and `check_ranks`), and when the KV
cache was laid out (`agree`).
"""

from __future__ import annotations

from typing import Any

from kvcached.integration.plan import Agreement
from kvcached.integration.refusal import refuse
from kvcached.integration.vllm.backends import record_name

__all__ = [
    "agree",
    "attention_backends",
    "check_engine",
    "check_model",
    "check_ranks",
    "has_worker_processes",
]


def has_worker_processes(executor_class: type) -> bool:
    """Whether an executor of this class runs its workers in processes of their own."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return executor_class is MultiprocExecutor


def check_engine(vllm_config: Any, executor_class: type) -> None:
    """Refuse by what the configuration alone says.

    Raises:
        UnsupportedConfiguration: naming the first feature in the way.
    """
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        refuse(f"platform {current_platform.device_name}")
    for what, size in (
        ("pipeline parallelism", parallel.pipeline_parallel_size),
        ("data parallelism", parallel.data_parallel_size),
        ("decode context parallelism", parallel.decode_context_parallel_size),
        ("prefill context parallelism", parallel.prefill_context_parallel_size),
        ("a number of nodes", parallel.nnodes),
    ):
        if size > 1:
            refuse(f"{what} of {size}", "tensor parallelism on one machine is")
    if executor_class is not UniProcExecutor and not has_worker_processes(executor_class):
        refuse(
            f"executor {executor_class.__name__}",
            "'uni' (one worker in the scheduler's process) and 'mp' (a process for each tensor parallel rank) are",
        )
    if parallel.world_size != parallel.tensor_parallel_size:
        refuse(f"a world of {parallel.world_size} with tensor parallelism of {parallel.tensor_parallel_size}")
    if vllm_config.speculative_config is not None:
        refuse("speculative decoding")
    if vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        refuse("a KV connector or KV offloading")
    if model.enable_sleep_mode or model.enable_cumem_allocator:
        refuse("sleep mode or the cumem allocator")
    if model.enable_return_routed_experts:
        refuse("enable_return_routed_experts")
    if model.is_encoder_decoder:
        refuse("cross attention (an encoder-decoder model)")
    if model.use_mla:
        refuse("multi-head latent attention (MLA)")
    if model.is_hybrid:
        refuse("a hybrid model (Mamba or linear attention)")
    if getattr(model, "is_diffusion", False):
        refuse("a diffusion model")
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if scheduler not in (Scheduler, AsyncScheduler):
        refuse(f"scheduler class {scheduler.__name__}")


def check_ranks(specs: list[dict[str, Any]]) -> None:
    """Refuse ranks that do not have the same KV cache: a page is backed on all of them or on none.

    Args:
        specs: of each rank, the KV cache spec of each layer that has one.

    Raises:
        UnsupportedConfiguration: the ranks differ.
    """
    if any(each != specs[0] for each in specs):
        refuse("a model whose ranks differ in their KV cache")


def check_model(vllm_config: Any, specs: dict[str, Any]) -> None:
    """Refuse by what the loaded model turned out to be.

    Args:
        vllm_config: of the engine.
        specs: KV cache spec of each layer that has one, as the worker reports them.

    Raises:
        UnsupportedConfiguration: naming the layer and what is unsupported about it.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            refuse(f"{name}: a layer that shares the KV cache of another")
    if not specs:
        refuse("a model without KV cache")
    for name, spec in specs.items():
        _check_spec(name, spec)
    if len(set(specs.values())) > 1:
        refuse("a model whose layers differ in their KV cache (several groups)")


def _check_spec(name: str, spec: Any) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    if type(spec) is not FullAttentionSpec:
        refuse(f"{name}: {type(spec).__name__}", "only full attention is")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        refuse(f"{name}: a sliding window or chunked attention")
    if spec.page_size_padded is not None:
        refuse(f"{name}: padded KV pages")
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        refuse(f"{name}: KV cache quantisation ({spec.kv_quant_mode.name})")


def attention_backends(vllm_config: Any, specs: dict[str, Any]) -> set[str]:
    """The attention backends of the layers that have a KV cache, FlashAttention with its version ("FLASH_ATTN/3")."""
    layers = vllm_config.compilation_config.static_forward_context
    return {record_name(layers[name]) for name in specs}


def agree(kv_cache_configs: list[Any]) -> Agreement:
    """What the engine laid out on every rank, in our words.

    Args:
        kv_cache_configs: vLLM's `KVCacheConfig` of each rank, of 0.26 (one tensor a layer) or of 0.29 (layers by
        strides).

    Raises:
        UnsupportedConfiguration: several groups, packed or shared tensors, blocks that are not one run of
        bytes, ranks that differ.
    """
    agreement, *others = map(_agree, kv_cache_configs)
    if any(other != agreement for other in others):
        refuse("a KV cache that differs from rank to rank")
    return agreement


def _agree(kv_cache_config: Any) -> Agreement:
    groups, tensors = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
    if len(groups) != 1:
        refuse(f"a KV cache of {len(groups)} groups")
    (group,) = groups
    _check_spec(group.layer_names[0], group.kv_cache_spec)
    block_bytes, num_blocks = group.kv_cache_spec.page_size_bytes, kv_cache_config.num_blocks
    if tensors and hasattr(tensors[0], "shared_by"):
        layers = _layers_by_tensor(tensors, block_bytes * num_blocks)
    else:
        layers = _layers_by_stride(kv_cache_config)
    if sorted(layers) != sorted(group.layer_names):
        refuse("a KV cache whose layers are not each placed once")
    return Agreement(tuple(layers), block_bytes, group.kv_cache_spec.block_size, num_blocks)


def _layers_by_tensor(tensors: list[Any], nbytes: int) -> list[str]:
    """0.26: `KVCacheTensor(size, shared_by, offset, block_stride)`, one allocation each unless packed."""
    for tensor in tensors:
        if tensor.block_stride > 0:
            refuse("a packed KV cache")
        if len(tensor.shared_by) != 1 or tensor.size != nbytes:
            refuse("KV cache tensors that layers share")
    return [tensor.shared_by[0] for tensor in tensors]


def _layers_by_stride(kv_cache_config: Any) -> list[str]:
    """0.29: `KVCacheTensor(size, layers, layer_stride, block_stride, offset)` in one allocation."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = kv_cache_config.kv_cache_layout
    if layout is None or not KVCacheLayout[layout].is_block_compact:
        refuse(f"KV cache layout {layout}", "a block must be one run of bytes in each layer")
    return [layer for tensor in kv_cache_config.kv_cache_tensors for layer in tensor.layers]

"""The seams of vLLM, declared: what we replace, what we only rely on, in which versions, and why."""

from __future__ import annotations

from kvcached.integration.patching import PatchSet, Seam, Versions, supported
from kvcached.integration.vllm import allocation, block_pool, capacity, metrics, release, warmup

__all__ = ["SUPPORTED", "front_end_set", "scheduler_set", "worker_set"]

V26 = Versions("0.26", "0.27")
V29 = Versions("0.29", "0.30")
SUPPORTED = (V26, V29)

_EXECUTOR = "vllm.v1.executor"
_CORE = "vllm.v1.core"
_WORKER = "vllm.v1.worker"


def scheduler_set(version: str) -> PatchSet:
    """The seams of the process that holds an engine's scheduler and its executor.

    Args:
        version: vLLM's, "0.29.0+cpu" for instance.

    Raises:
        SeamError: a version that we do not carry.
    """
    versions = supported("vllm", version, SUPPORTED)
    return PatchSet("vllm", [*_executor(versions), *_scheduler(versions), *_relied_on(versions)])


def worker_set(version: str, device_type: str) -> PatchSet:
    """The seams of a process that holds a worker, which may be the same.

    Args:
        version: vLLM's.
        device_type: "cuda" or "cpu": the CPU build has no memory profile and no V2 warm-up to seam.

    Raises:
        SeamError: a version that we do not carry.
    """
    versions = supported("vllm", version, SUPPORTED)
    seams = [*_worker(versions), *_allocation(versions)]
    if device_type == "cuda":
        seams += _gpu_worker(versions)
    return PatchSet("vllm", seams)


def front_end_set(version: str) -> PatchSet:
    """The seam of the process that answers requests. Of no consequence for an engine: it is put in place by itself.

    Args:
        version: vLLM's.

    Raises:
        SeamError: a version that we do not carry.
    """
    registry = Seam(
        f"{metrics.MODULE}:get_prometheus_registry",
        metrics.with_our_figures,
        (),
        supported("vllm", version, SUPPORTED),
        "what /metrics shows: with what the KV caches of the engines do",
        also_rebind=True,
    )
    return PatchSet("vllm", [registry])


def _executor(versions: Versions) -> list[Seam]:
    return [
        Seam(
            f"{_EXECUTOR}.abstract:Executor.initialize_from_config",
            allocation.reserved_on_all_ranks,
            ("self", "kv_cache_configs"),
            versions,
            "the KV cache is agreed, not yet allocated: have its addresses reserved",
        ),
        Seam(
            f"{_EXECUTOR}.uniproc_executor:UniProcExecutor.shutdown",
            allocation.closed_with_executor,
            ("self",),
            versions,
            "the worker is gone: give the memory back",
        ),
        Seam(
            f"{_EXECUTOR}.multiproc_executor:MultiprocExecutor.shutdown",
            allocation.closed_before_workers,
            ("self",),
            versions,
            "the workers are about to end: have them give the memory back",
        ),
        Seam(
            f"{_EXECUTOR}.multiproc_executor:MultiprocExecutor.collective_rpc",
            None,
            ("self", "method", "timeout", "args", "kwargs", "non_block", "unique_reply_rank", ...),
            versions,
            "the way to the workers",
        ),
        Seam(
            f"{_EXECUTOR}.uniproc_executor:UniProcExecutor.collective_rpc",
            None,
            ("self", "method", "timeout", "args", "kwargs", "non_block", "single_value"),
            versions,
            "the way to the worker",
        ),
    ]


def _worker(versions: Versions) -> list[Seam]:
    wrapper = f"{_WORKER}.worker_base:WorkerWrapperBase"
    return [
        Seam(
            f"{wrapper}.initialize_from_config",
            allocation.worker_sees_id_space,
            ("self", "kv_cache_configs"),
            versions,
            "the worker sees the id space where the scheduler counts blocks",
        ),
        Seam(
            f"{wrapper}.shutdown",
            allocation.unreachable_with_worker,
            ("self",),
            versions,
            "a worker that ends is no longer reached",
        ),
    ]


def _scheduler(versions: Versions) -> list[Seam]:
    scheduler = f"{_CORE}.sched.scheduler:Scheduler"
    return [
        Seam(
            f"{scheduler}.__init__",
            block_pool.adopt_block_pool,
            (
                *("self", "vllm_config", "kv_cache_config", "structured_output_manager", "block_size"),
                *("hash_block_size", "mm_registry", "include_finished_set", "log_stats"),
            ),
            versions,
            "the GPU block pool was built and nothing of it is in use: overlay it",
        ),
        Seam(
            f"{scheduler}.schedule",
            release.begin_step,
            ("self", "throttle_prefills"),
            versions,
            "a batch begins an epoch",
        ),
        Seam(
            f"{scheduler}.update_from_output",
            release.end_step,
            ("self", "scheduler_output", "model_runner_output"),
            versions,
            "the batch's GPU work has ended, and with it its epoch",
        ),
        *(
            Seam(
                f"{scheduler}.{method}",
                release.undisturbed,
                parameters,
                versions,
                "touches blocks: no other thread takes any meanwhile",
            )
            for method, parameters in (
                ("finish_requests", ("self", "request_ids", "finished_status")),
                ("reset_prefix_cache", ("self", "reset_running_requests", "reset_connector")),
                (
                    "make_stats",
                    ("self", "spec_decoding_stats", "kv_connector_stats", "cudagraph_stats", "perf_stats"),
                ),
            )
        ),
        Seam(
            f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate",
            block_pool.note_demand,
            (
                *("self", "request_id", "num_tokens", "new_computed_blocks", "num_encoder_tokens"),
                *("total_computed_tokens", "num_local_computed_tokens", "num_tokens_main_model"),
                "apply_admission_cap",
            ),
            versions,
            "reserve while checking: memory is secured before an allocation touches anything",
        ),
    ]


def _relied_on(versions: Versions) -> list[Seam]:
    """Methods that the overlay of the block pool overrides or calls."""
    queue, pool = f"{_CORE}.kv_cache_utils:FreeKVCacheBlockQueue", f"{_CORE}.block_pool:BlockPool"
    declared = {
        f"{queue}.popleft_n": ("self", "n"),
        f"{queue}.remove": ("self", "block"),
        f"{queue}.append": ("self", "block"),
        f"{queue}.append_n": ("self", "blocks"),
        f"{queue}.prepend_n": ("self", "blocks"),
        f"{queue}.get_all_free_blocks": ("self",),
        f"{queue}.iter_blocks_after": ("self", "cursor"),
        f"{pool}.get_num_free_blocks": ("self",),
        f"{pool}.get_new_blocks": ("self", "num_blocks"),
        f"{pool}.free_blocks": ("self", "ordered_blocks"),
        f"{pool}.touch": ("self", "blocks"),
        f"{pool}.reset_prefix_cache": ("self",),
        f"{pool}.get_cached_block": ("self", "block_hash", "kv_cache_group_ids"),
        f"{pool}._maybe_evict_cached_block": ("self", "block"),
        f"{pool}._remove_cached_block_hashes": ("self", "block"),
        f"{pool}._insert_block_hash": ("self", "block_hash_with_group_id", "block", "num_tokens"),
    }
    return [
        Seam(target, None, parameters, versions, "overlay of the block pool")
        for target, parameters in declared.items()
    ]


def _allocation(versions: Versions) -> list[Seam]:
    if versions is V29:
        return [
            Seam(
                f"{_WORKER}.utils:allocate_kv_cache",
                allocation.kv_cache_views,
                ("kv_cache_config", "device", "layout", "kernel_block_sizes"),
                versions,
                "one storage a layer on our addresses, viewed by vLLM's own code",
                also_rebind=True,
            ),
            Seam(
                "vllm.v1.kv_cache_interface:create_kv_cache_views",
                None,
                ("raw", "spec", "num_blocks", "layout", "kv_cache_tensor", "kernel_block_size"),
                versions,
                "the code that views",
            ),
        ]
    return [
        Seam(
            f"{_WORKER}.gpu_model_runner:GPUModelRunner._allocate_kv_cache_tensors",
            allocation.raw_tensors_v1,
            ("self", "kv_cache_config"),
            versions,
            "runner V1: one raw tensor a layer on our addresses",
        ),
        Seam(
            f"{_WORKER}.gpu.attn_utils:_allocate_kv_cache",
            allocation.raw_tensors_v2,
            ("kv_cache_config", "shared_layers", "device"),
            versions,
            "runner V2: the same",
            also_rebind=True,
        ),
    ]


def _gpu_worker(versions: Versions) -> list[Seam]:
    warm_up = ("model_runner", "worker_execute_model", "worker_sample_tokens")
    return [
        Seam(
            f"{_WORKER}.utils:request_memory",
            capacity.budget_at_start,
            ("init_snapshot", "cache_config"),
            versions,
            "a neighbour's memory is no reason not to start",
            also_rebind=True,
        ),
        Seam(
            f"{_WORKER}.gpu_worker:Worker.determine_available_memory",
            capacity.measured_alone,
            ("self",),
            versions,
            "what neighbours take or give back meanwhile is not this engine's use",
        ),
        Seam(
            f"{_WORKER}.gpu.warmup:warmup_kernels",
            warmup.back_made_up_blocks,
            warm_up,
            versions,
            "writes to block ids that nobody issued",
            also_rebind=True,
        ),
        Seam(
            f"{_WORKER}.gpu.warmup:run_mixed_prefill_decode_warmup",
            warmup.back_made_up_blocks,
            (*warm_up, "num_tokens", "mixed_step_context", "req_id_prefix"),
            versions,
            "writes to block ids that nobody issued",
            also_rebind=True,
        ),
    ]

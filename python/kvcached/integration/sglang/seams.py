"""The seams of SGLang, declared: what we replace, what we only rely on, in which versions, and why."""

from __future__ import annotations

from kvcached.integration.patching import PatchSet, Seam, Versions, supported

__all__ = ["SUPPORTED", "patch_set"]

V17 = Versions("0.5.17", "0.5.18")
SUPPORTED = (V17,)

_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler:Scheduler"
_CONFIGURATOR = f"{_SRT}.mem_cache.kv_cache_configurator:KVCacheConfigurator"


def patch_set(version: str) -> PatchSet:
    """The seams for one version.

    Args:
        version: SGLang's, "0.5.17" for instance.

    Raises:
        SeamError: a version that we do not carry.
    """
    versions = supported("sglang", version, SUPPORTED)
    return PatchSet("sglang", [*_worker(versions), *_scheduler(versions), *_relied_on(versions)])


def _worker(versions: Versions) -> list[Seam]:
    from kvcached.integration.sglang import build, capacity

    return [
        Seam(
            f"{_SRT}.model_executor.model_runner:ModelRunner.init_torch_distributed",
            capacity.own_use_from_here,
            ("self",),
            versions,
            "the device is open and nothing is on it yet: what this process uses is counted from here",
        ),
        Seam(
            f"{_CONFIGURATOR}._profile_available_bytes",
            capacity.measured_alone,
            ("self", "pre_model_load_memory"),
            versions,
            "what neighbours take or give back meanwhile is not this engine's use",
        ),
        Seam(
            f"{_CONFIGURATOR}.configure",
            build.checked,
            ("self", "pre_model_load_memory"),
            versions,
            "the model is known and no pool exists: refuse here what is not carried, and look at what was built",
        ),
        Seam(
            f"{_CONFIGURATOR}._build_mha_kv_pool",
            build.elastic_pool,
            ("self", "max_total_num_tokens", "mha_pool_class", "quant_method"),
            versions,
            "the KV cache is agreed, not yet allocated: its tensors lie on our addresses",
        ),
        Seam(
            f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
            build.elastic_allocator,
            (
                *("self", "sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool"),
                "token_to_kv_pool_allocator",
            ),
            versions,
            "the allocator was built and nothing of it is in use: its ids come from our ledger",
        ),
    ]


def _scheduler(versions: Versions) -> list[Seam]:
    from kvcached.integration.sglang import admission, release

    adder, batch = (
        f"{_SRT}.managers.schedule_policy:PrefillAdder",
        f"{_SRT}.managers.schedule_batch:ScheduleBatch",
    )
    return [
        Seam(
            f"{adder}.add_one_req",
            admission.secured_request,
            ("self", "req", "has_chunked_req", "truncation_align_size"),
            versions,
            "reserve while checking: a request is admitted when memory for this batch is on hand",
        ),
        Seam(
            f"{adder}.add_chunked_req",
            admission.secured_chunk,
            ("self", "req"),
            versions,
            "the same for the next chunk, which is cut to what can be had, or waits",
        ),
        Seam(
            f"{batch}.check_decode_mem",
            admission.secured_decode,
            ("self", "selected_indices"),
            versions,
            "the same for one more token of each running request; too little, and SGLang retracts",
        ),
        Seam(
            f"{batch}.retract_decode",
            admission.retracted_not_aborted,
            ("self", "server_args"),
            versions,
            "memory that others hold comes back: the last request waits for it and is not aborted",
        ),
        Seam(
            f"{_SCHEDULER}.get_next_batch_to_run",
            admission.begin_pass,
            ("self", "running_batch", "last_batch"),
            versions,
            "what the device has room for is asked once a pass, and only where requests wait",
        ),
        Seam(
            f"{_SCHEDULER}.init_pool_stats_observer",
            admission.observer_counts_blocks,
            ("self",),
            versions,
            "usage and leak checks count blocks, whatever memory there is; the tree of cached prefixes is there: it is adopted",
        ),
        Seam(
            f"{_SCHEDULER}.run_batch",
            release.begin_step,
            ("self", "batch", "pp_proxy_tensors"),
            versions,
            "a batch begins an epoch",
        ),
        Seam(
            f"{_SCHEDULER}.process_batch_result",
            release.end_step,
            ("self", "batch", "result"),
            versions,
            "the batch's GPU work has ended, and with it its epoch",
        ),
        Seam(
            f"{_SCHEDULER}.on_idle",
            release.settle,
            ("self",),
            versions,
            "no batch is queued: an idle engine keeps nothing but cached prefixes and its reserve",
        ),
    ]


def _relied_on(versions: Versions) -> list[Seam]:
    """Methods that our subclasses override or call."""
    allocator = f"{_SRT}.mem_cache.allocator"
    base, token = f"{allocator}.base:BaseTokenToKVPoolAllocator", f"{allocator}.token:TokenToKVPoolAllocator"
    paged = f"{allocator}.paged:PagedTokenToKVPoolAllocator"
    pool = f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool"
    lens = ("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc")
    declared = {
        f"{base}.free_group_begin": ("self",),
        f"{base}.free_group_end": ("self",),
        f"{base}.free_segment": ("self", "free_index", "start_pos"),
        f"{base}.free_segments": ("self", "segments"),
        f"{base}.resize": ("self", "config"),
        f"{token}.clear": ("self",),
        f"{token}.available_size": ("self",),
        f"{token}.alloc": ("self", "need_size"),
        f"{token}.free": ("self", "free_index"),
        f"{paged}.clear": ("self",),
        f"{paged}.alloc": ("self", "need_size"),
        f"{paged}.alloc_extend": ("self", *lens, "extend_num_tokens", "num_new_pages"),
        f"{paged}.alloc_decode": ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
        f"{paged}.free": ("self", "free_index"),
        f"{paged}.free_segment": ("self", "free_index", "start_pos"),
        f"{paged}._release_page_ids": ("self", "page_ids"),
        f"{paged}._debug_check_no_duplicate_pages": ("self",),
        f"{_SRT}.mem_cache.radix_cache:RadixCache.evict": ("self", "params"),
        f"{_SRT}.mem_cache.radix_cache:RadixCache.evictable_size": ("self",),
        f"{_SRT}.mem_cache.radix_cache:RadixCache._delete_leaf": ("self", "node"),
        f"{_SRT}.mem_cache.events:KVCacheEventMixin._record_remove_event": ("self", "node", "medium"),
        f"{_SRT}.utils.common:get_num_new_pages": ("seq_lens", "page_size", "prefix_lens", "decode"),
        f"{pool}._create_buffers_normal": ("self",),
        f"{pool}._init_data_ptrs_and_strides": ("self",),
        f"{pool}.get_kv_size_bytes": ("self",),
        f"{_SRT}.managers.schedule_batch:ScheduleBatch.new_tokens_required_next_decode": (
            *("self", "selected_indices"),
        ),
        f"{_SRT}.managers.schedule_batch:ScheduleBatch.release_req": (
            *("self", "idx", "remaing_req_count", "server_args"),
        ),
    }
    return [
        Seam(target, None, parameters, versions, "our subclasses override it or call it")
        for target, parameters in declared.items()
    ]

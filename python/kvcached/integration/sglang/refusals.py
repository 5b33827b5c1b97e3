"""Which engines kvcached carries, and which it refuses by name. Nothing here changes anything.

Asked at two moments, each as early as the answer is known: before the scheduler has a worker
(`check_engine`), and when the model is loaded and no pool exists (`check_model`, `check_pool_class`).
"""

from __future__ import annotations

from typing import Any

from kvcached.integration.refusal import refuse

__all__ = ["check_engine", "check_model", "check_pool_class"]

#: Server arguments: the only value that is carried, and what any other means.
_CARRIED = {
    "tp_size": (1, "tensor parallelism"),
    "pp_size": (1, "pipeline parallelism"),
    "dp_size": (1, "data parallelism"),
    "dcp_size": (1, "decode context parallelism"),
    "attn_cp_size": (1, "attention context parallelism"),
    "nnodes": (1, "several nodes"),
    "speculative_algorithm": (None, "speculative decoding (a draft pool)"),
    "disaggregation_mode": ("null", "disaggregated prefill and decode"),
    "enable_pdmux": (False, "PD multiplexing"),
    "enable_hierarchical_cache": (False, "the hierarchical cache (HiCache)"),
    "enable_lmcache": (False, "LMCache"),
    "enable_flexkv": (False, "FlexKV"),
    "enable_hisparse": (False, "hierarchical sparse attention"),
    "radix_cache_backend": (None, "a radix cache backend of its own"),
    "enable_memory_saver": (False, "the memory saver"),
    "enable_unified_memory": (False, "the unified memory pool"),
    "enable_page_major_kv_layout": (False, "the page-major KV layout"),
    "prefill_only_disable_kv_cache": (False, "prefill without a KV cache"),
    "dllm_algorithm": (None, "diffusion models"),
    "kv_canary": ("none", "the KV canary"),
    "enable_return_routed_experts": (False, "returning routed experts"),
    "enable_return_indexer_topk": (False, "returning the indexer's choice"),
}


def check_engine(server_args: Any) -> None:
    """Refuse by what the server arguments alone say.

    Raises:
        UnsupportedConfiguration: naming the first feature in the way.
    """
    from sglang.srt.environ import envs

    if server_args.device not in ("cuda", "cpu"):
        refuse(f"device {server_args.device}")
    for name, (carried, what) in _CARRIED.items():
        if (value := getattr(server_args, name)) != carried:
            flag = name.replace("_", "-")
            refuse(f"{what} (--{flag} {value})")
    if server_args.enable_mixed_chunk and server_args.page_size > 1:
        refuse("mixed chunks (--enable-mixed-chunk) with pages of several tokens", "use --page-size 1")
    if envs.SGLANG_USE_HND_KVCACHE.get():
        refuse("the HND KV layout (SGLANG_USE_HND_KVCACHE)")
    if envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get():
        refuse("the C++ radix tree (SGLANG_EXPERIMENTAL_CPP_RADIX_TREE)")
    if server_args.post_capture_kv_sizing_planned():
        refuse("sizing the KV cache after graph capture (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING)")


def check_model(configurator: Any) -> None:
    """Refuse by what the loaded model turned out to be.

    Args:
        configurator: SGLang's `KVCacheConfigurator`, before it has built anything.

    Raises:
        UnsupportedConfiguration: naming what is unsupported about the model.
    """
    model = configurator.model_config
    if configurator.is_draft_worker:
        refuse("a draft model's pool")
    if configurator.use_mla_backend:
        refuse("multi-head latent attention (MLA, DSA)")
    if configurator.is_hybrid_swa:
        refuse("sliding-window attention (SWA)")
    if configurator.mambaish_config is not None:
        refuse("a hybrid model (Mamba or linear attention)")
    if model.is_encoder_decoder:
        refuse("cross attention (an encoder-decoder model)")
    if configurator.kv_cache_dtype != configurator.model_dtype:
        refuse(f"a KV cache of {configurator.kv_cache_dtype} for a model of {configurator.model_dtype}")


def check_pool_class(pool_class: type, quant_method: Any) -> None:
    """Refuse a pool that is not SGLang's own plain one, by another plug-in for instance.

    Raises:
        UnsupportedConfiguration: naming the class, or the quantisation.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if pool_class is not MHATokenToKVPool or pool_class.__module__ != "sglang.srt.mem_cache.memory_pool":
        refuse(f"KV pool {pool_class.__module__}.{pool_class.__qualname__}")
    if quant_method is not None:
        refuse(f"KV cache quantisation ({type(quant_method).__name__})")

"""What kvcached does not carry is named, as early as it is known. Each check alone, on SGLang's own defaults."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs

from kvcached.integration.refusal import UnsupportedConfiguration
from kvcached.integration.sglang import pool, refusals

NOT_CARRIED = [
    ("tp_size", 2, "tensor parallelism"),
    ("pp_size", 2, "pipeline parallelism"),
    ("dp_size", 2, "data parallelism"),
    ("dcp_size", 2, "decode context parallelism"),
    ("attn_cp_size", 2, "attention context parallelism"),
    ("nnodes", 2, "several nodes"),
    ("speculative_algorithm", "EAGLE", "speculative decoding"),
    ("disaggregation_mode", "prefill", "disaggregated prefill and decode"),
    ("disaggregation_mode", "decode", "disaggregated prefill and decode"),
    ("enable_pdmux", True, "PD multiplexing"),
    ("enable_hierarchical_cache", True, "HiCache"),
    ("enable_lmcache", True, "LMCache"),
    ("enable_flexkv", True, "FlexKV"),
    ("enable_hisparse", True, "hierarchical sparse attention"),
    ("radix_cache_backend", "mine", "a radix cache backend of its own"),
    ("enable_memory_saver", True, "the memory saver"),
    ("enable_unified_memory", True, "the unified memory pool"),
    ("enable_page_major_kv_layout", True, "the page-major KV layout"),
    ("prefill_only_disable_kv_cache", True, "prefill without a KV cache"),
    ("dllm_algorithm", "LowConfidence", "diffusion models"),
    ("kv_canary", "log", "the KV canary"),
    ("enable_return_routed_experts", True, "returning routed experts"),
    ("enable_return_indexer_topk", True, "returning the indexer's choice"),
]


def arguments(**others: Any) -> Any:
    """SGLang's defaults, so that an argument that it renames is noticed; what it fills in itself is filled in."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(ServerArgs)
        if field.default is not dataclasses.MISSING
    }
    filled = {"device": "cuda", "page_size": 1, "post_capture_kv_sizing_planned": lambda: False}
    assert {"device", "page_size"} <= defaults.keys() and hasattr(
        ServerArgs, "post_capture_kv_sizing_planned"
    )
    assert others.keys() <= defaults.keys() | filled.keys()
    return SimpleNamespace(**defaults | filled | others)


def refused(*words: str) -> Any:
    pattern = ".*".join(word.replace("(", r"\(").replace(")", r"\)") for word in words)
    return pytest.raises(UnsupportedConfiguration, match=f"{pattern}.*is not supported yet")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_sglang_s_defaults_are_carried(device, page_size):
    refusals.check_engine(arguments(device=device, page_size=page_size))


@pytest.mark.parametrize(("name", "value", "what"), NOT_CARRIED)
def test_an_argument_that_is_not_carried_is_named(name, value, what):
    with refused(what, f"(--{name.replace('_', '-')} {value})"):
        refusals.check_engine(arguments(**{name: value}))


def test_other_devices():
    with refused("device xpu"):
        refusals.check_engine(arguments(device="xpu"))


def test_mixed_chunks_only_with_pages_of_one_token():
    refusals.check_engine(arguments(enable_mixed_chunk=True, page_size=1))
    with pytest.raises(UnsupportedConfiguration, match=r"--enable-mixed-chunk.*use --page-size 1"):
        refusals.check_engine(arguments(enable_mixed_chunk=True, page_size=16))


@pytest.mark.parametrize("variable", ["SGLANG_USE_HND_KVCACHE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"])
def test_variables_of_sglang(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with refused(variable):
        refusals.check_engine(arguments())


def test_sizing_after_graph_capture():
    with refused("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        refusals.check_engine(arguments(post_capture_kv_sizing_planned=lambda: True))


def configurator(**others: Any) -> Any:
    """As SGLang's `KVCacheConfigurator` is for a plain model, before it has built anything."""
    plain = {
        "is_draft_worker": False,
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "mambaish_config": None,
        "kv_cache_dtype": torch.bfloat16,
        "model_dtype": torch.bfloat16,
    }
    assert plain.keys() <= {field.name for field in dataclasses.fields(KVCacheConfigurator)}
    model = {"is_encoder_decoder": False, "head_dim": 128, "v_head_dim": 128}
    model |= {name: others.pop(name) for name in list(others) if name in model}
    assert others.keys() <= plain.keys()
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        **plain | others,
    )


def test_a_plain_model_is_carried():
    refusals.check_model(configurator())


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"is_draft_worker": True}, "a draft model's pool"),
        ({"use_mla_backend": True}, "multi-head latent attention"),
        ({"is_hybrid_swa": True}, "sliding-window attention"),
        ({"mambaish_config": object()}, "a hybrid model"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "a KV cache of torch.float8_e4m3fn for a model of torch.bfloat16"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_carried_is_named(other, what):
    with refused(what):
        refusals.check_model(configurator(**other))


def test_k_and_v_rows_of_different_widths():
    with refused("K and V rows differ in width (128 and 64)"):
        pool.agree(configurator(v_head_dim=64), 1000)


def test_pool_classes():
    class MHATokenToKVPoolOfAnother(MHATokenToKVPool):
        pass

    refusals.check_pool_class(MHATokenToKVPool, None)
    with refused("KV pool sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"):
        refusals.check_pool_class(MLATokenToKVPool, None)
    with refused("MHATokenToKVPoolOfAnother"):
        refusals.check_pool_class(MHATokenToKVPoolOfAnother, None)
    with refused("KV cache quantisation (SimpleNamespace)"):
        refusals.check_pool_class(MHATokenToKVPool, SimpleNamespace())

"""Which pages a model's KV cache gets, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached import _core
from kvcached.config import Settings
from kvcached.doctor.finding import Finding
from kvcached.errors import KVCachedConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["geometry"]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


def geometry(folder: str, device: str, *, ranks: int, block_tokens: int) -> Iterator[Finding]:
    """Pages of one rank, by the model's config.json: a page of K and V of every layer, as vLLM lays them out.

    Args:
        folder: with a config.json in the form of Hugging Face. device: "cuda:N" or "cpu".
        ranks: tensor parallel size. block_tokens: tokens of a block.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
        layers, heads, head_bytes = shape(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(
            "problem",
            "model",
            f"{path}: {error!r}",
            "give a folder with a config.json of a model with ordinary attention",
        )
        return
    block_bytes = block_tokens * max(1, heads // ranks) * head_bytes
    page_bytes = None
    try:
        page_bytes = Settings.from_env().page_bytes
        for layout in ("chunked", "per-layer"):
            solved = _core.Geometry.solve(
                2 * layers,
                block_bytes,
                _core.granularity(device),
                page_bytes=page_bytes,
                tokens_per_block=block_tokens,
                layout=layout,
            )
            yield Finding("ok", f"pages, {layout}", solved.explain())
    except KVCachedConfigError as error:
        yield Finding("problem", "pages", str(error), "docs/GEOMETRY.md says what fits")


def shape(config: dict[str, Any]) -> tuple[int, int, int]:
    """Layers, K or V heads, and bytes of one head of one token."""
    config = config.get("text_config", config)
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if "kv_lora_rank" in config:
        raise ValueError("latent attention (MLA) is not carried yet")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype}: none of {', '.join(ITEM_BYTES)}")
    return layers, kv_heads, head_dim * ITEM_BYTES[dtype]

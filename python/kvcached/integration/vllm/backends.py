"""The names under which `kvcached.kernel_records` knows vLLM's attention backends."""

from __future__ import annotations

from typing import Any

__all__ = ["FLASH_ATTENTION", "record_name"]

#: Several backends by one name.
FLASH_ATTENTION = "FLASH_ATTN"


def record_name(layer: Any) -> str:
    """What records call the backend of an `Attention` layer: vLLM's name, FlashAttention's with its version ("FLASH_ATTN/3")."""
    name: str = layer.get_attn_backend().get_name()
    version = getattr(layer.impl, "vllm_flash_attn_version", None)
    return f"{name}/{version}" if name == FLASH_ATTENTION else name

"""Elastic KV cache for LLM inference engines.

An engine that runs with ``ENABLE_KVCACHED=true`` keeps its KV cache tensors at fixed virtual addresses; kvcached puts
physical memory under them page by page while requests need it and gives it back after. Nothing else need be called.

For other users of such memory: `KVCacheManager` hands out blocks, `kvcached.vmm_ops` creates the tensors behind them.
"""

from kvcached import vmm_ops
from kvcached._core import __version__
from kvcached.kv_cache_manager import KVCacheManager

__all__ = ["KVCacheManager", "__version__", "vmm_ops"]

"""The worker's side: SGLang's pool of K and V tensors, on our addresses.

Two counts must never meet. `pool.size` natively bounds the *indices* (stores, copies and checks compare with
`size + page_size`): here it is the rows of the id space less a page. The allocator's `size` and everything
that SGLang plans with stay the usable tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvcached.integration.plan import Agreement
from kvcached.integration.refusal import refuse

if TYPE_CHECKING:
    from kvcached.integration.rank import RankMemory

__all__ = ["ElasticMHATokenToKVPool", "agree"]


def agree(configurator: Any, max_total_num_tokens: int) -> Agreement:
    """What a `KVCacheConfigurator` is about to lay out: K and V of each layer, in blocks of one SGLang page.

    Raises:
        UnsupportedConfiguration: K and V rows of different widths.
    """
    from sglang.srt.runtime_context import get_parallel

    model = configurator.model_config
    if model.v_head_dim != model.head_dim:
        refuse(f"a model whose K and V rows differ in width ({model.head_dim} and {model.v_head_dim})")
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    page_size, layers = configurator.pool_page_size, configurator.layer_info.num_effective_layers
    return Agreement(
        buffers=tuple(f"{kind}{layer}" for layer in range(layers) for kind in "kv"),
        block_bytes=page_size * heads * model.head_dim * configurator.kv_cache_dtype.itemsize,
        tokens_per_block=page_size,
        num_blocks=max_total_num_tokens // page_size + 1,  # block 0 takes what padding writes
    )


class ElasticMHATokenToKVPool(MHATokenToKVPool):  # type: ignore[misc]
    """`k_buffer[l]`, `v_buffer[l]`: contiguous tensors (rows of the id space, heads, head_dim) of which only backed rows
    may be touched. Page 0, where padding writes, is backed from the start, before warm-up and graph capture.
    """

    is_elastic = True

    def __init__(self, *args: Any, rank: RankMemory, **kwargs: Any) -> None:
        self._rank = rank
        super().__init__(*args, **kwargs)

    def _create_buffers_normal(self) -> None:
        if self.use_hnd or self.kv_cache_layout != "nhd":
            refuse(f"KV cache layout {self.kv_cache_layout}")
        rows = self._rank.ftensor.id_space * self.page_size
        self.size = rows - self.page_size
        shape = (rows, self.head_num, self.head_dim)
        tensors = self._rank.tensors()
        views = {name: raw.view(self.store_dtype).view(shape) for name, raw in tensors.items()}
        self.k_buffer = [views[f"k{layer}"] for layer in range(self.layer_num)]
        self.v_buffer = [views[f"v{layer}"] for layer in range(self.layer_num)]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(K, V) bytes of all usable tokens, as natively; not what is mapped now, nor the addresses."""
        assert self._rank.plan is not None
        agreement = self._rank.plan.agreement
        half = agreement.num_blocks * agreement.block_bytes * self.layer_num
        return half, half

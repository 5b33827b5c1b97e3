"""The pools of one engine as they are built: checked before, elastic, and looked at afterwards.

No class of SGLang is replaced, so that nothing can have captured a native one: the pool's class is an
argument of the method that builds it, and the allocator that was just built is exchanged before anybody else
knows it. Both are subclasses of SGLang's own concrete classes, which its `isinstance` checks name.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedError
from kvcached.integration.memory import EngineMemory
from kvcached.integration.rank import RankMemory
from kvcached.integration.refusal import decline, refuse
from kvcached.integration.sglang import refusals
from kvcached.integration.sglang.allocator import make_elastic
from kvcached.integration.sglang.pool import ElasticMHATokenToKVPool, agree

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["checked", "elastic_allocator", "elastic_pool"]


def checked(original: Any) -> Any:
    """Replacement of `KVCacheConfigurator.configure`, which builds the pools of one model."""

    @functools.wraps(original)
    def configure(self: Any, *, pre_model_load_memory: Any) -> Any:
        memory, rank = EngineMemory.of(self.server_args), RankMemory.of(self.server_args)
        if memory is None or rank is None:
            return original(self, pre_model_load_memory=pre_model_load_memory)
        try:
            refusals.check_model(self)
            rank.attended_by(self.server_args.get_attention_backends())
            return _all_elastic(original(self, pre_model_load_memory=pre_model_load_memory))
        except KVCachedError as error:
            EngineMemory.detach(self.server_args)
            RankMemory.detach(self.server_args)
            memory.close()
            decline(error)
        # Nothing has been handed out. Outside the handler, whose error holds what was built: that is gone by now, and
        # its memory free, before it is built again natively.
        return original(self, pre_model_load_memory=pre_model_load_memory)

    return configure


def elastic_pool(original: Any) -> Any:
    """Replacement of `KVCacheConfigurator._build_mha_kv_pool`."""

    @functools.wraps(original)
    def _build_mha_kv_pool(
        self: Any, *, max_total_num_tokens: int, mha_pool_class: Any, quant_method: Any = None
    ) -> Any:
        memory, rank = EngineMemory.of(self.server_args), RankMemory.of(self.server_args)
        if memory is None or rank is None:
            return original(
                self,
                max_total_num_tokens=max_total_num_tokens,
                mha_pool_class=mha_pool_class,
                quant_method=quant_method,
            )
        refusals.check_pool_class(mha_pool_class, quant_method)
        device = f"cuda:{self.gpu_id}" if self.device == "cuda" else "cpu"
        rank.reserve(memory.decide(agree(self, max_total_num_tokens), [rank.survey(device)]), device)
        return original(
            self,
            max_total_num_tokens=max_total_num_tokens,
            mha_pool_class=functools.partial(ElasticMHATokenToKVPool, rank=rank),
            quant_method=None,
        )

    return _build_mha_kv_pool


def elastic_allocator(original: Any) -> Any:
    """Replacement of `KVCacheConfigurator._build_token_to_kv_pool_allocator`."""

    @functools.wraps(original)
    def _build_token_to_kv_pool_allocator(self: Any, **kwargs: Any) -> Any:
        allocator = original(self, **kwargs)
        memory = EngineMemory.of(self.server_args)
        return allocator if memory is None else make_elastic(allocator, memory)

    return _build_token_to_kv_pool_allocator


def _all_elastic(result: Any) -> Any:
    check_built(result.token_to_kv_pool, result.token_to_kv_pool_allocator)
    return result


def check_built(kv_pool: Any, allocator: Any) -> None:
    """Walk the pools and allocators that were built: all elastic, or refused by name. An elastic pool behind a native
    allocator, or the other way about, would read and write where no memory is.

    Raises:
        UnsupportedConfiguration: naming the class that is not elastic.
    """
    for part in _parts(kv_pool, allocator):
        if not getattr(part, "is_elastic", False):
            refuse(f"{type(part).__name__}")
    if allocator.get_kvcache() is not kv_pool:
        refuse(f"{type(allocator).__name__} over a pool that is not its engine's")


def _parts(*roots: Any) -> Iterator[Any]:
    """Every pool and allocator that can be reached from these by attributes."""
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache

    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        yield part
        waiting += [
            value for value in vars(part).values() if isinstance(value, BaseTokenToKVPoolAllocator | KVCache)
        ]

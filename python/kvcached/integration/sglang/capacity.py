"""How much KV cache this process may count on, whatever its neighbours on the GPU do meanwhile.

SGLang takes what is free on the *device* before its weights are loaded, times `mem_fraction_static`, and
subtracts what has become less since. With an elastic cache the number is a virtual budget of this process,
and "free" means "free if nobody else were here". SGLang's own code does the rest, and what the user has set
(`max_total_tokens`) is read by that code, as ever.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvcached.integration.own_use import OwnUse
from kvcached.integration.rank import RankMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["measured_alone", "own_use_from_here"]

GIB = 1 << 30


def own_use_from_here(original: Any) -> Any:
    """Replacement of `ModelRunner.init_torch_distributed`, after which the device is open."""

    @functools.wraps(original)
    def init_torch_distributed(self: Any) -> Any:
        result = original(self)
        rank = RankMemory.of(self.server_args)
        if rank is not None and self.device == "cuda":
            rank.own_use = OwnUse.of_device(self.gpu_id)
        return result

    return init_torch_distributed


def measured_alone(original: Any) -> Any:
    """Replacement of `KVCacheConfigurator._profile_available_bytes`, which answers in bytes."""

    @functools.wraps(original)
    def _profile_available_bytes(self: Any, pre_model_load_memory: float) -> int:
        rank = RankMemory.of(self.server_args)
        if rank is None or rank.own_use is None:
            return int(original(self, pre_model_load_memory))
        with _free_memory_is(rank.own_use):
            return int(original(self, rank.own_use.free_at_start / GIB))

    return _profile_available_bytes


@contextmanager
def _free_memory_is(own_use: OwnUse) -> Iterator[None]:
    """For the profile, whose module has the function that asks the device under a name of its own."""
    from sglang.srt.mem_cache import kv_cache_configurator as module

    native = module.get_available_gpu_memory

    def available_gib(*args: Any, **kwargs: Any) -> float:
        native(*args, **kwargs)  # it empties torch's cache, which counts as used
        return own_use.info()[0] / GIB

    module.get_available_gpu_memory = available_gib
    try:
        yield
    finally:
        module.get_available_gpu_memory = native

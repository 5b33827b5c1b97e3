"""How much KV cache this process may count on, whatever its neighbours on the GPU do meanwhile.

vLLM sizes its KV cache by differences of the *device's* free memory, and so charges itself with whatever
others take while it starts, and dies of an assertion when they give something back. With an elastic cache
the number is a virtual budget: utilisation x device - weights - own peak. Nothing is computed anew here.
For as long as vLLM measures, "used" means "used by this process"; its own code does the rest, and what the
user has set (`kv_cache_memory_bytes`, `num_gpu_blocks_override`) is read by that code first, as ever.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvcached.integration.own_use import OwnUse
from kvcached.integration.rank import RankMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["budget_at_start", "measured_alone"]


def budget_at_start(original: Any) -> Any:
    """Replacement of `request_memory`: a neighbour's memory is no reason not to start.

    Its snapshot, from which vLLM later takes differences, is put into terms of this process. An engine that
    turns out to run natively gets it back, with the error that vLLM would have raised.
    """

    @functools.wraps(original)
    def request_memory(init_snapshot: Any, cache_config: Any) -> Any:
        rank = RankMemory.of(cache_config)
        if rank is None:
            return original(init_snapshot, cache_config)
        native = dict(vars(init_snapshot))

        def undo() -> None:
            vars(init_snapshot).update(native)
            original(init_snapshot, cache_config)

        rank.on_refusal(undo)
        rank.own_use = OwnUse.of_device(init_snapshot.device_)
        init_snapshot.free_memory, init_snapshot.total_memory = rank.own_use.info()
        init_snapshot.cuda_memory = init_snapshot.total_memory - init_snapshot.free_memory
        init_snapshot.non_torch_memory = init_snapshot.cuda_memory - init_snapshot.torch_memory
        return original(init_snapshot, cache_config)

    return request_memory


def measured_alone(original: Any) -> Any:
    """Replacement of `Worker.determine_available_memory`: what it measures is this process."""

    @functools.wraps(original)
    def determine_available_memory(self: Any) -> Any:
        rank = RankMemory.of(self.cache_config)
        if rank is None or rank.own_use is None:
            return original(self)
        with _free_memory_is(rank.own_use):
            return original(self)

    return determine_available_memory


@contextmanager
def _free_memory_is(own_use: OwnUse) -> Iterator[None]:
    """For vLLM's profiling, all of which asks `torch.accelerator.get_memory_info`."""
    import torch

    native = torch.accelerator.get_memory_info
    torch.accelerator.get_memory_info = lambda *_args, **_kwargs: own_use.info()
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = native

"""How much KV cache this process may count on, whatever its neighbours on the GPU do meanwhile.

vLLM sizes its KV cache by differences of the *device's* free memory, and so charges itself with whatever
others take while it starts, and dies of an assertion when they give something back. With an elastic cache
the number is a virtual budget: utilisation x device - weights - own peak. Nothing is computed anew here.
For as long as vLLM measures, "used" means "used by this process"; its own code does the rest, and what the
user has set (`kv_cache_memory_bytes`, `num_gpu_blocks_override`) is read by that code first, as ever.

This process's use is torch's reserved memory, which torch counts itself, and the rest (CUDA context, cuBLAS
and NCCL buffers, loaded kernels). For the rest NVML is asked, by process. Where it does not know this
process (a container with process ids of its own) the rest is the growth of the device's use beyond torch's
since the first measurement, held between 0 and `MAX_REST_BYTES`: a neighbour can then distort the budget by
that much at most, and a budget that is slightly too high costs nothing but a request that waits for memory.
"""

from __future__ import annotations

import functools
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvcached.integration.vllm.memory import EngineMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["OwnUse", "budget_at_start", "measured_alone"]

MAX_REST_BYTES = 1536 << 20
"""What a process on an H200 uses beside torch was seen below 1 GiB."""


class OwnUse:
    """Bytes of one device that this process uses.

    Args:
        reserved: bytes that torch holds now.
        device_info: (free, total) bytes of the device, as the driver says.
        by_process: bytes that NVML knows of this process, None where it does not.
    """

    def __init__(
        self,
        reserved: Callable[[], int],
        device_info: Callable[[], tuple[int, int]],
        by_process: Callable[[], int | None],
    ) -> None:
        self._reserved, self._device_info, self._by_process = reserved, device_info, by_process
        self._others_at_start = self._others()
        # Decided once: differences between the two ways of counting would look like use.
        known = by_process()
        free, total = device_info()
        self._nvml = known is not None and reserved() <= known <= total - free
        self._rest = 0

    def _others(self) -> int:
        """Use of the device that is not this process's torch."""
        free, total = self._device_info()
        return total - free - self._reserved()

    def bytes(self) -> int:
        reserved = self._reserved()
        if not self._nvml:
            self._rest = min(max(self._others() - self._others_at_start, 0), MAX_REST_BYTES)
        elif (known := self._by_process()) is not None:
            self._rest = max(known - reserved, 0)
        return reserved + self._rest

    def info(self) -> tuple[int, int]:
        """(free, total) as if this process had the device to itself."""
        total = self._device_info()[1]
        return total - self.bytes(), total


def _own_use(device: Any) -> OwnUse:
    import torch

    return OwnUse(
        reserved=lambda: torch.accelerator.memory_reserved(device),
        device_info=lambda: torch.cuda.mem_get_info(device),
        by_process=functools.partial(_nvml_bytes, str(torch.cuda.get_device_properties(device).uuid)),
    )


def _nvml_bytes(uuid: str) -> int | None:
    """Memory of this process by NVML, None where NVML is missing or does not see it under this process id."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass
    return None


def budget_at_start(original: Any) -> Any:
    """Replacement of `request_memory`: a neighbour's memory is no reason not to start.

    Its snapshot, from which vLLM later takes differences, is put into terms of this process. An engine that
    turns out to run natively gets it back, with the error that vLLM would have raised.
    """

    @functools.wraps(original)
    def request_memory(init_snapshot: Any, cache_config: Any) -> Any:
        memory = EngineMemory.of(cache_config)
        if memory is None:
            return original(init_snapshot, cache_config)
        native = dict(vars(init_snapshot))

        def undo() -> None:
            vars(init_snapshot).update(native)
            original(init_snapshot, cache_config)

        memory.on_refusal(undo)
        memory.own_use = _own_use(init_snapshot.device_)
        init_snapshot.free_memory, init_snapshot.total_memory = memory.own_use.info()
        init_snapshot.cuda_memory = init_snapshot.total_memory - init_snapshot.free_memory
        init_snapshot.non_torch_memory = init_snapshot.cuda_memory - init_snapshot.torch_memory
        return original(init_snapshot, cache_config)

    return request_memory


def measured_alone(original: Any) -> Any:
    """Replacement of `Worker.determine_available_memory`: what it measures is this process."""

    @functools.wraps(original)
    def determine_available_memory(self: Any) -> Any:
        memory = EngineMemory.of(self.cache_config)
        if memory is None or memory.own_use is None:
            return original(self)
        with _free_memory_is(memory.own_use):
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

"""What this process uses of a device, whatever its neighbours on it do meanwhile.

Engines size their KV cache by differences of the *device's* free memory, and so charge themselves with
whatever others take while they start. This is the number that they mean.

It is torch's reserved memory, which torch counts itself, and the rest (CUDA context, cuBLAS and NCCL
buffers, loaded kernels). For the rest NVML is asked, by process. Where it does not know this process (a
container with process ids of its own) the rest is the growth of the device's use beyond torch's since the
first measurement, held between 0 and `MAX_REST_BYTES`: a neighbour can then distort the budget by that much
at most, and a budget that is slightly too high costs nothing but a request that waits for memory.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OwnUse"]

MAX_REST_BYTES = 1536 << 20
"""What a process on an H200 uses beside torch was seen below 1 GiB."""


class OwnUse:
    """Bytes of one device that this process uses.

    Args:
        reserved: bytes that torch holds now.
        device_info: (free, total) bytes of the device, as the driver says.
        by_process: bytes that NVML knows of this process, None where it does not.

    Attributes:
        free_at_start: bytes that would be free now if this process had the device to itself.
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
        self.free_at_start = self.info()[0]

    @classmethod
    def of_device(cls, device: Any) -> OwnUse:
        """Of a CUDA device as torch names it: an index, or a `torch.device`."""
        import torch

        return cls(
            reserved=lambda: torch.cuda.memory_reserved(device),
            device_info=lambda: torch.cuda.mem_get_info(device),
            by_process=functools.partial(_nvml_bytes, str(torch.cuda.get_device_properties(device).uuid)),
        )

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


def _pynvml() -> Any:
    """The one that is installed, or the one that vLLM brings along."""
    for name in ("pynvml", "vllm.third_party.pynvml"):
        try:
            return importlib.import_module(name)
        except ImportError:
            pass
    return None


def _nvml_bytes(uuid: str) -> int | None:
    """Memory of this process by NVML, None where NVML is missing or does not see it under this process id."""
    pynvml = _pynvml()
    if pynvml is None:
        return None
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

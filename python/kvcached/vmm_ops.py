"""KV cache tensors on reserved addresses, and the mapping of their pages.

A process has at most one group of tensors for each `group_id`. Pages are numbered from 0; one page holds m blocks in
every buffer of its group (see `kvcached._core.Geometry`). Touching a row of a tensor whose page is not backed is an
error of the caller: SIGSEGV on a CPU, an illegal address on a GPU.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvcached import _core
from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError, KVCachedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "backend_name",
    "create_kv_tensors",
    "get_ftensor",
    "init_kvcached",
    "kv_tensors_created",
    "map_to_kv_tensors",
    "shutdown_kvcached",
    "unmap_from_kv_tensors",
]

# The chunk of a group whose block size is not told: every power-of-two block up to it fits whole.
_UNTOLD_BLOCK_BYTES = 256 << 10


class _Process:
    """What `init_kvcached` settled for this process, and the groups created since."""

    def __init__(self, device: str, page_bytes: int | None) -> None:
        self.device = device
        self.page_bytes = page_bytes
        self.groups: dict[int, _core.FTensor] = {}


_lock = threading.Lock()
_process: _Process | None = None


def _default_device() -> str:
    """The first GPU where the driver starts and finds one, else the host backend."""
    try:
        _core.granularity("cuda:0")
    except KVCachedError:
        return "cpu"
    return "cuda:0"


def init_kvcached(device: str | None = None, page_size: int = 0, contiguous_layout: bool = True) -> None:
    """Choose the device that this process's KV tensors live on.

    Args:
        device: "cuda:N" or "cpu" (the host backend). None: the first GPU, or "cpu" where there is none.
        page_size: target size of a page in bytes, a multiple of the device's granularity; 0: that of
            `KVCACHED_PAGE_MB`, else chosen by the solver.
        contiguous_layout: must be True; the one-range-a-buffer layout is not built yet.

    Raises:
        KVCachedConfigError: called twice with other values, a page size that the device cannot map, or an unsupported layout.
        DriverUnavailableError: no driver for that device.
    """
    global _process
    device = device or _default_device()
    if not contiguous_layout:
        raise KVCachedConfigError("contiguous_layout=False is not supported yet: leave it at True")
    granularity = _core.granularity(device)
    if page_size < 0 or page_size % granularity:
        raise KVCachedConfigError(
            f"page_size={page_size} is not a multiple of {granularity} bytes, the smallest page of {device}: "
            f"round it up to {-(-max(page_size, 1) // granularity) * granularity}"
        )
    with _lock:
        wanted = (device, page_size or Settings.from_env().page_bytes)
        if _process is not None and (_process.device, _process.page_bytes) != wanted:
            raise KVCachedConfigError(
                f"kvcached was initialised for {_process.device} with page size {_process.page_bytes}: "
                "call shutdown_kvcached() before choosing another"
            )
        if _process is None:
            _process = _Process(*wanted)


def _state() -> _Process:
    if _process is None:
        raise KVCachedConfigError("call kvcached.vmm_ops.init_kvcached(device) first")
    return _process


def backend_name() -> str:
    """ "cuda" or "host": what backs this process's tensors, or would by default before `init_kvcached`."""
    device = _process.device if _process is not None else _default_device()
    return "host" if device == "cpu" else device.partition(":")[0]


def create_kv_tensors(
    size: int,
    itemsize: int,
    device: str | None = None,
    num_layers: int = 1,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    *,
    block_bytes: int | None = None,
    tokens_per_block: int = 1,
) -> list[Any]:
    """Reserve the tensors of one group; nothing is backed yet.

    Args:
        size: bytes of cache wanted in one layer, all its buffers together.
        itemsize: bytes of one element; `size` must hold whole elements.
        device: as in `init_kvcached`, which is called with it where nobody has.
        num_layers, num_kv_buffers: the group has `num_layers * num_kv_buffers` buffers (2: K and V apart; 1: combined or latent).
        group_id: names the group in this process.
        block_bytes: bytes of one block in one buffer. None: a chunk is 256 KiB, in which blocks of any power of two up to that lie whole.
        tokens_per_block: tokens of a block; ids times this must fit int32.

    Returns:
        One 1-D int8 tensor a buffer, layer-major, of `id_space * block_bytes` bytes each: torch tensors where torch is
        installed, else DLPack exporters (`numpy.from_dlpack` reads those of a CPU).

    Raises:
        KVCachedConfigError: the group exists, or the numbers make no cache. GeometryError: no page fits them.
    """
    if _process is None:
        init_kvcached(device)
    state = _state()
    if device is not None and device != state.device:
        raise KVCachedConfigError(f"kvcached was initialised for {state.device}, not {device}")
    if itemsize <= 0 or size <= 0 or size % itemsize:
        raise KVCachedConfigError(f"size={size} bytes is not a positive multiple of itemsize={itemsize}")
    if num_layers <= 0 or num_kv_buffers <= 0:
        raise KVCachedConfigError(
            f"num_layers={num_layers} and num_kv_buffers={num_kv_buffers} must be positive"
        )
    block = block_bytes or _UNTOLD_BLOCK_BYTES
    geometry = _core.Geometry.solve(
        num_layers * num_kv_buffers,
        block,
        _core.granularity(state.device),
        page_bytes=state.page_bytes,
        tokens_per_block=tokens_per_block,
    )
    num_blocks = -(-size // (num_kv_buffers * block))
    with _lock:
        if group_id in state.groups:
            raise KVCachedConfigError(f"group {group_id} has its tensors already: use another group_id")
        ftensor = _core.FTensor(state.device, geometry, num_blocks)
        state.groups[group_id] = ftensor
    return [_as_tensor(buffer) for buffer in ftensor.buffers()]


def _as_tensor(buffer: _core.Buffer) -> Any:
    try:
        import torch
    except ImportError:
        return buffer
    return torch.from_dlpack(buffer)


def kv_tensors_created(group_id: int = 0) -> bool:
    """Whether the group has its tensors."""
    return _process is not None and group_id in _process.groups


def get_ftensor(group_id: int = 0) -> _core.FTensor:
    """The reserved range behind a group's tensors. Raises `KVCachedConfigError` where there is none."""
    groups = _state().groups
    if group_id not in groups:
        raise KVCachedConfigError(
            f"group {group_id} has no tensors: call create_kv_tensors(..., group_id={group_id}) first"
        )
    return groups[group_id]


def map_to_kv_tensors(pages: Sequence[int], group_id: int = 0) -> list[int]:
    """Back these pages, all or none; returns those that were not backed before.

    Raises:
        KVCachePoolExhausted: the device is out of memory. MapQuarantinedError: an undo failed. DriverError: anything else
        that the driver refused. ValueError: no such page.
    """
    return get_ftensor(group_id).map(pages)


def unmap_from_kv_tensors(pages: Sequence[int], group_id: int = 0) -> None:
    """Give these pages back. The caller makes sure that no GPU work reads them any more.

    Raises:
        StateConsistencyError: a page is not backed (nothing changed). DriverError: the driver refused.
    """
    get_ftensor(group_id).unmap(pages)


def shutdown_kvcached() -> None:
    """Forget all groups. Memory goes when the last tensor over it goes. Idempotent."""
    global _process
    with _lock:
        _process = None

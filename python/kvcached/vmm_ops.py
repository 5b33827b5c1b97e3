"""KV cache tensors on reserved addresses, and the mapping of their pages.

A process has at most one group of tensors for each `group_id`. Pages are numbered from 0; one page holds m blocks in
every buffer of its group (see `kvcached._core.Geometry`). A row whose page is not backed reads as zeros, and writing it is
an error of the caller; with `KVCACHED_UNBACKED=hole`, which saves the zeros and half the driver calls, so is reading it:
SIGSEGV on a CPU, an illegal address on a GPU.
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
    "abort_unmap_from_kv_tensors",
    "backend_name",
    "commit_unmap_from_kv_tensors",
    "create_kv_tensors",
    "get_ftensor",
    "init_kvcached",
    "kv_tensors_created",
    "map_to_kv_tensors",
    "prepare_unmap_from_kv_tensors",
    "shutdown_kvcached",
    "unmap_from_kv_tensors",
]

# The chunk of a group whose block size is not told: every power-of-two block up to it fits whole.
_UNTOLD_BLOCK_BYTES = 256 << 10


class _Process:
    """What `init_kvcached` settled for this process, and the groups created since."""

    def __init__(self, device: str, page_bytes: int | None, layout: str) -> None:
        self.device = device
        self.page_bytes = page_bytes
        self.layout = layout
        self.groups: dict[int, _core.FTensor] = {}


_lock = threading.Lock()
_process: _Process | None = None


def _default_device() -> str:
    """The first GPU where a driver starts and finds one, else the host backend."""
    for device in ("cuda:0", "hip:0"):
        try:
            _core.granularity(device)
        except KVCachedError:
            continue
        return device
    return "cpu"


def init_kvcached(
    device: str | None = None, page_size: int = 0, contiguous_layout: bool | None = None
) -> None:
    """Choose the device that this process's KV tensors live on.

    Args:
        device: "cuda:N" (NVIDIA), "hip:N" (AMD; PyTorch for ROCm calls it "cuda:N") or "cpu" (the host backend). None: the
            first GPU, or "cpu" where there is none.
        page_size: target size of a page in bytes, a multiple of the device's granularity; 0: that of
            `KVCACHED_PAGE_MB`, else chosen by the solver.
        contiguous_layout: True: one piece of memory a page for all buffers, sparse block ids. False: one a buffer and page,
            dense ids. None: that of `KVCACHED_LAYOUT`, whose `auto` is True here, but False on AMD GPUs, whose kernels were
            never run over sparse ids.

    Raises:
        KVCachedConfigError: called twice with other values, or a page size that the device cannot map.
        DriverUnavailableError: no driver for that device.
    """
    global _process
    device = device or _default_device()
    granularity = _core.granularity(device)
    if page_size < 0 or page_size % granularity:
        raise KVCachedConfigError(
            f"page_size={page_size} is not a multiple of {granularity} bytes, the smallest page of {device}: "
            f"round it up to {-(-max(page_size, 1) // granularity) * granularity}"
        )
    with _lock:
        settings = Settings.from_env()
        if contiguous_layout is None:
            sparse = not device.startswith("hip")
            contiguous_layout = sparse if settings.layout == "auto" else settings.layout == "chunked"
        wanted = (
            device,
            page_size or settings.page_bytes,
            "chunked" if contiguous_layout else "per-layer",
        )
        if _process is not None and (_process.device, _process.page_bytes, _process.layout) != wanted:
            raise KVCachedConfigError(
                f"kvcached was initialised for {_process.device} with page size {_process.page_bytes} and the "
                f"{_process.layout} layout: call shutdown_kvcached() before choosing another"
            )
        if _process is None:
            _process = _Process(*wanted)


def _state() -> _Process:
    if _process is None:
        raise KVCachedConfigError("call kvcached.vmm_ops.init_kvcached(device) first")
    return _process


def backend_name() -> str:
    """ "cuda", "hip" or "host": what backs this process's tensors, or would by default before `init_kvcached`."""
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
        layout=state.layout,
    )
    settings = Settings.from_env()
    num_blocks = -(-size // (num_kv_buffers * block))
    with _lock:
        if group_id in state.groups:
            raise KVCachedConfigError(f"group {group_id} has its tensors already: use another group_id")
        ftensor = _core.FTensor(
            state.device,
            geometry,
            num_blocks,
            # Nobody knows which kernels will read these tensors: `auto` takes no risk.
            unbacked="hole" if settings.unbacked == "hole" else "zero",
            cache_bytes=settings.handle_cache_bytes,
        )
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


def prepare_unmap_from_kv_tensors(pages: Sequence[int], transaction_id: int, group_id: int = 0) -> None:
    """Unmap these pages and keep their memory, so that several ranks can do it together or not at all.

    Args:
        pages: all of them backed.
        transaction_id: greater than those before it. A group has one transaction at a time. Repeating a step does nothing.
        group_id: the group.

    Raises:
        StateConsistencyError: it may not follow what came before, or a page is not backed (nothing changed).
        MapQuarantinedError: the driver refused; everything is mapped again, but for the pages that the message names.
    """
    get_ftensor(group_id).prepare_unmap(transaction_id, pages)


def commit_unmap_from_kv_tensors(transaction_id: int, group_id: int = 0) -> None:
    """Release the memory of a prepared transaction.

    Raises:
        StateConsistencyError: it was never prepared, or is aborted (nothing changed). DriverError: some could not be
        released: call it again.
    """
    get_ftensor(group_id).commit_unmap(transaction_id)


def abort_unmap_from_kv_tensors(transaction_id: int, group_id: int = 0) -> None:
    """Map the memory of a prepared transaction back, with what it holds. One that comes before its prepare is remembered,
    and the prepare refused.

    Raises:
        StateConsistencyError: it is committed (nothing changed). MapQuarantinedError: the pages that the message names could
        not be mapped back.
    """
    get_ftensor(group_id).abort_unmap(transaction_id)


def shutdown_kvcached() -> None:
    """Forget all groups. Memory goes when the last tensor over it goes. Idempotent."""
    global _process
    with _lock:
        _process = None

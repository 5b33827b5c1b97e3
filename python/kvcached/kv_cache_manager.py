"""`KVCacheManager`: hands out the blocks of one group of KV cache tensors."""

from __future__ import annotations

import weakref
from typing import Literal, NamedTuple, SupportsIndex

from kvcached import _core, vmm_ops
from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError, QuarantinedResizeError
from kvcached.instance import hardware, process_record, shares

__all__ = ["KVCacheManager", "MemoryLimit"]

_live: weakref.WeakSet[KVCacheManager] = weakref.WeakSet()
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


class MemoryLimit(NamedTuple):
    """How much memory a pool may have, and what came of saying so.

    `state`: "applied"; "deferred": it holds for what is allocated from now on, and what is held beyond it goes as blocks are freed;
    "rejected": pages in an unknown state hold more than that, for good (`reason`); and of a request "stale": a limit of a later
    revision stands, "conflict": another limit of this very revision stands. The other numbers are always those of the limit that
    stands: `revision` 0 is the limit that a pool begins with, all that it reserved, and `limit_bytes` is never more than that.
    `occupied_bytes`: of mapped pages, the reserve among them, and of lost ones.
    """

    state: Literal["applied", "deferred", "rejected", "stale", "conflict"]
    revision: int
    limit_bytes: int
    occupied_bytes: int
    reason: str | None


class KVCacheManager(_core.Pool):
    """Blocks of a group whose tensors `kvcached.vmm_ops` created, or are created here where nobody has yet.

    A block is `block_size` tokens of `cell_size` bytes in each of `num_layers * num_kv_buffers` buffers. `num_blocks` is a
    count: ids are sparse and lie below `id_space`; block id times `block_size * cell_size` is the offset of a block in
    every buffer. `alloc`, `free` and the rest are those of `kvcached._core.Pool`, whose docstrings say what they promise.

    Args:
        num_blocks: usable blocks, the null block included.
        block_size: tokens of a block.
        cell_size: bytes of one token in one buffer.
        num_layers: layers of the group.
        world_size, pp_rank: must be 1 and 0: engines of several ranks are not supported yet.
        async_sched: emptied pages stay mapped until `release_through` says that queued GPU work has ended.
        reserve_null_block: block 0 is taken and backed for good.
        num_kv_buffers: buffers a layer (2: K and V apart; 1: combined or latent).
        group_id: which group of this process.
        pool_name: how `kvctl` shows the pool; default "group <id>".

    Raises:
        KVCachedConfigError: numbers that make no cache or do not fit the tensors of the group. GeometryError: no page fits.
        KVCachePoolExhausted: the null block, or the minimum reserve, could not be backed.
    """

    _num_layers: int

    def __new__(
        cls,
        num_blocks: int,
        block_size: int,
        cell_size: int,
        num_layers: int,
        world_size: int = 1,
        pp_rank: int = 0,
        async_sched: bool = False,
        reserve_null_block: bool = False,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        pool_name: str | None = None,
    ) -> KVCacheManager:
        if world_size != 1 or pp_rank != 0:
            raise KVCachedConfigError(
                f"world_size={world_size}, pp_rank={pp_rank}: engines of several ranks are not supported yet; use 1 and 0"
            )
        numbers = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "cell_size": cell_size,
            "num_layers": num_layers,
            "num_kv_buffers": num_kv_buffers,
        }
        for name, number in numbers.items():
            if number <= 0:
                raise KVCachedConfigError(f"{name}={number} must be positive")
        block_bytes = block_size * cell_size
        if not vmm_ops.kv_tensors_created(group_id):
            vmm_ops.create_kv_tensors(
                num_blocks * block_bytes * num_kv_buffers,
                cell_size,
                num_layers=num_layers,
                num_kv_buffers=num_kv_buffers,
                group_id=group_id,
                block_bytes=block_bytes,
                tokens_per_block=block_size,
            )
        ftensor = vmm_ops.get_ftensor(group_id)
        if ftensor.geometry.num_buffers != num_layers * num_kv_buffers:
            raise KVCachedConfigError(
                f"group {group_id} has {ftensor.geometry.num_buffers} buffers, not {num_layers} layers x {num_kv_buffers}"
            )
        on = [hardware(ftensor.device)]
        record = process_record("kvcached", ftensor.device, on)
        made = super().__new__(
            cls,
            ftensor,
            geometry=ftensor.geometry.with_block(block_bytes, tokens_per_block=block_size),
            num_blocks=num_blocks,
            reserve_null_block=reserve_null_block,
            async_sched=async_sched,
            record=record,
            charged=shares(record, on),
            pool_name=pool_name or f"group {group_id}",
            **Settings.from_env().pool_options,
        )
        made._num_layers = num_layers
        _live.add(made)
        return made

    @staticmethod
    def live() -> list[KVCacheManager]:
        """Those of this process that are not shut down."""
        return list(_live)

    def shutdown(self) -> int:
        """Give all memory back; see `kvcached._core.Pool.shutdown`."""
        lost = super().shutdown()
        _live.discard(self)
        return lost

    @property
    def layout(self) -> str:
        """One line that says how blocks lie in the tensors and why."""
        return self.geometry.explain()

    def set_memory_limit(
        self, limit_bytes: SupportsIndex, *, revision: SupportsIndex | None = None
    ) -> MemoryLimit:
        """Have at most so many bytes of memory under the tensors, padding included; see `MemoryLimit` for what comes of it.

        A larger limit holds at once. A smaller one keeps live blocks where they are: memory leaves in the background, the reserve
        first. 0 drains the pool; the page of the null block stays.

        Args:
            limit_bytes: whole pages count. More than is reserved means all of it.
            revision: from 1, greater than the one that stands, so that a request that comes late does not undo a newer one;
                None: the next.

        Raises:
            KVCachedConfigError: no ints from 0 on; nothing was changed.
        """
        return MemoryLimit(*super().set_memory_limit(limit_bytes, revision=revision))

    def memory_limit_state(self) -> MemoryLimit:
        """The limit that stands, and whether it is met now."""
        return MemoryLimit(*super().memory_limit_state())

    def resize(self, bytes_per_layer: int) -> bool:
        """Have room for at most so many bytes of KV cache of each layer, all its buffers together: `set_memory_limit` in other
        numbers, with the next revision. Whole pages count; as many bytes as all blocks have mean all pages.

        Returns:
            Whether it holds, now ("applied") or as soon as what is held beyond it is freed ("deferred").

        Raises:
            KVCachedConfigError: not an int from 0 on. QuarantinedResizeError: pages in an unknown state hold more; the limit that
            stood stands.
        """
        if not isinstance(bytes_per_layer, int) or bytes_per_layer < 0:
            raise KVCachedConfigError(f"bytes_per_layer={bytes_per_layer!r}: use an int from 0 on")
        block_bytes = self.geometry.block_bytes * self.geometry.num_buffers // self._num_layers
        num_blocks = bytes_per_layer // block_bytes
        num_pages = num_blocks // self.geometry.blocks_per_page
        if num_blocks >= self.num_blocks:
            num_pages = self.geometry.num_pages(self.num_blocks)  # the last one may have fewer blocks
        limit = self.set_memory_limit(num_pages * self.geometry.page_bytes)
        if limit.state == "rejected":
            raise QuarantinedResizeError(f"bytes_per_layer={bytes_per_layer}: {limit.reason}")
        return limit.state in ("applied", "deferred")

    def get_mapped_memory_size(self, unit: str = "GB") -> float:
        """Physical memory behind the tensors, the reserve included, in "B", "KB", "MB" or "GB" (binary units)."""
        if unit not in _UNITS:
            raise KVCachedConfigError(f"unit={unit!r}: use one of {', '.join(_UNITS)}")
        return self.stats()["mapped_bytes"] / _UNITS[unit]

    def observability_snapshot(self) -> dict[str, int | str]:
        """Pages by state, blocks and bytes of this pool, as `stats`, with its device and layout."""
        return {**self.stats(), "device": self.ftensor.device, "layout": self.layout}

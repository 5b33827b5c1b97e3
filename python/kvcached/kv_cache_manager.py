"""`KVCacheManager`: hands out the blocks of one group of KV cache tensors."""

from __future__ import annotations

from kvcached import _core, vmm_ops
from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError
from kvcached.instance import process_record

__all__ = ["KVCacheManager"]

_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


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
        async_sched: emptied pages stay mapped until `end_step` says that queued GPU work has ended.
        reserve_null_block: block 0 is taken and backed for good.
        num_kv_buffers: buffers a layer (2: K and V apart; 1: combined or latent).
        group_id: which group of this process.
        pool_name: how `kvctl` shows the pool; default "group <id>".

    Raises:
        KVCachedConfigError: numbers that make no cache or do not fit the tensors of the group. GeometryError: no page fits.
        KVCachePoolExhausted: the null block could not be backed.
    """

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
        return super().__new__(
            cls,
            ftensor,
            geometry=ftensor.geometry.with_block(block_bytes, tokens_per_block=block_size),
            num_blocks=num_blocks,
            reserve_null_block=reserve_null_block,
            async_sched=async_sched,
            record=process_record("kvcached", ftensor.device),
            pool_name=pool_name or f"group {group_id}",
            **Settings.from_env().pool_options,
        )

    @property
    def layout(self) -> str:
        """One line that says how blocks lie in the tensors and why."""
        return self.geometry.explain()

    def get_mapped_memory_size(self, unit: str = "GB") -> float:
        """Physical memory behind the tensors, the reserve included, in "B", "KB", "MB" or "GB" (binary units)."""
        if unit not in _UNITS:
            raise KVCachedConfigError(f"unit={unit!r}: use one of {', '.join(_UNITS)}")
        return self.stats()["mapped_bytes"] / _UNITS[unit]

    def observability_snapshot(self) -> dict[str, int | str]:
        """Pages by state, blocks and bytes of this pool, as `stats`, with its device and layout."""
        return {**self.stats(), "device": self.ftensor.device, "layout": self.layout}

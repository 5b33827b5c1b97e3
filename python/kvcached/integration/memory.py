"""One engine's elastic memory: from the KV cache that was agreed to the pool that its scheduler draws from.

Knows no engine: what an engine laid out reaches it as an `Agreement`.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcached import _core
from kvcached.instance import process_record
from kvcached.integration.kernels import Kernels, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcached.config import Settings
    from kvcached.integration.own_use import OwnUse

__all__ = ["Agreement", "EngineMemory"]

logger = logging.getLogger("kvcached")

_ATTRIBUTE = "_kvcached_memory"
_engine_numbers = itertools.count()  # in one process, whose record has a row for each pool
_live: weakref.WeakSet[EngineMemory] = weakref.WeakSet()


@dataclass(frozen=True)
class Agreement:
    """What an engine's KV cache comes to: one group of buffers, all with blocks of one size.

    Args:
        buffers: their names in the engine's words, in the order of their chunks in a page.
        block_bytes: bytes of one block in one buffer.
        tokens_per_block: tokens of a block.
        num_blocks: usable blocks, the null block included.
    """

    buffers: tuple[str, ...]
    block_bytes: int
    tokens_per_block: int
    num_blocks: int


class EngineMemory:
    """What one engine has of us. Found again through the configs that it was attached to.

    An engine's objects meet it in this order: whoever starts the engine (`attach`), the model once it is loaded
    (`backends`), the KV cache once it is agreed (`reserve`), the worker (`tensors`), warm-up (`back_rows`, `unback`), the scheduler (`open_pool`),
    the end (`close`). Engines in one process know nothing of each other.
    """

    def __init__(self, settings: Settings, engine: str, version: str) -> None:
        self.settings = settings
        self.kernels = Kernels(engine, version, frozenset())
        self.agreement: Agreement | None = None
        self.pool: _core.Pool | None = None
        self.own_use: OwnUse | None = None
        self.latest_epoch = 0
        """What `begin_epoch` returned last."""
        self._ftensor: _core.FTensor | None = None
        self._on_refusal: list[Callable[[], None]] = []

    # ------------------------------------------------------------ finding it

    @classmethod
    def of(cls, config: Any) -> EngineMemory | None:
        """The memory attached to a config, None for an engine that runs natively."""
        return getattr(config, _ATTRIBUTE, None)

    def attach(self, config: Any) -> None:
        """Let `of(config)` find this memory, in copies of `config` too."""
        setattr(config, _ATTRIBUTE, self)

    @staticmethod
    def detach(config: Any) -> None:
        if hasattr(config, _ATTRIBUTE):
            delattr(config, _ATTRIBUTE)

    @staticmethod
    def live() -> list[EngineMemory]:
        """Those of this process that have memory."""
        return list(_live)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineMemory:
        return self  # engines copy their configs; there is still one memory

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # in another process the config is an ordinary one

    @property
    def engine(self) -> str:
        """The engine and its version, as others see them."""
        return f"{self.kernels.engine} {self.kernels.version}"

    def attended_by(self, backends: Iterable[str]) -> None:
        """The attention backends that will run on this memory, by the names of `kvcached.kernel_records`."""
        self.kernels = replace(self.kernels, backends=frozenset(backends))

    # ------------------------------------------------------------ refusal

    def on_refusal(self, undo: Callable[[], None]) -> None:
        """Have `undo` called if this engine turns out to be one that runs natively."""
        self._on_refusal.append(undo)

    def refuse(self) -> None:
        """The engine runs natively after all: undo what it has seen of us, newest first."""
        undo, self._on_refusal = self._on_refusal, []
        self.close()
        for call in reversed(undo):
            call()

    # ------------------------------------------------------------ addresses and memory

    @property
    def ftensor(self) -> _core.FTensor:
        if self._ftensor is None:
            raise _core.StateConsistencyError(
                "the KV cache of this engine is not reserved, or closed already"
            )
        return self._ftensor

    def reserve(self, agreement: Agreement, device: str) -> None:
        """Reserve the addresses of all buffers and back page 0, where the null block lies.

        Raises:
            GeometryError: no page fits, or ids would pass 2^31.
            KVCachedConfigError: the name of this instance is taken.
            KVCachedError: the driver refused.
        """
        self.close()
        process_record(self.engine, device)  # a name that is taken is refused before anything is allocated
        ground = choose(self.settings, self.kernels, device)
        geometry = _core.Geometry.solve(
            len(agreement.buffers),
            agreement.block_bytes,
            _core.granularity(device),
            page_bytes=self.settings.page_bytes,
            tokens_per_block=agreement.tokens_per_block,
            layout=ground.layout,
            num_blocks=agreement.num_blocks,
        )
        ftensor = _core.FTensor(
            device,
            geometry,
            agreement.num_blocks,
            unbacked=ground.unbacked,
            cache_bytes=self.settings.handle_cache_bytes,
        )
        ftensor.map([0])
        self.agreement, self._ftensor = agreement, ftensor
        _live.add(self)
        logger.info(
            "elastic KV cache on %s: %d buffers, %d blocks, %.1f GiB of addresses, unbacked memory %s; %s",
            device,
            len(agreement.buffers),
            agreement.num_blocks,
            ftensor.virtual_bytes / 2**30,
            ground.unbacked,
            geometry.explain(),
        )

    def tensors(self) -> dict[str, Any]:
        """The bytes of each buffer: a flat int8 torch tensor of exactly `id_space` blocks, a storage of its
        own.
        """
        import torch

        assert self.agreement is not None
        return dict(zip(self.agreement.buffers, map(torch.from_dlpack, self.ftensor.buffers()), strict=True))

    def back_rows(self, ids: Iterable[int]) -> list[int]:
        """Back the pages behind these rows of every buffer; returns those that were not backed before."""
        ftensor = self.ftensor
        pages = {page for row in set(ids) for page in ftensor.geometry.pages_of_row(row)}
        return ftensor.map(sorted(page for page in pages if page < ftensor.num_pages))

    def unback(self, pages: Iterable[int]) -> None:
        """Take back what `back_rows` backed, once all GPU work has ended. Page 0 stays."""
        self.ftensor.synchronise()
        self.ftensor.unmap(sorted(set(pages) - {0}))

    # ------------------------------------------------------------ the scheduler's pool

    def open_pool(self) -> _core.Pool:
        """The pool over the reserved range; from now on it alone maps and unmaps pages."""
        self.pool = _core.Pool(
            self.ftensor,
            reserve_null_block=True,
            async_sched=True,
            record=process_record(self.engine, self.ftensor.device),
            pool_name=f"engine {next(_engine_numbers)}",
            **self.settings.pool_options,
        )
        return self.pool

    def begin_epoch(self) -> int:
        """Work is about to be queued that may read any page which is mapped now. Returns its epoch."""
        self.latest_epoch = self._opened().begin_epoch()
        return self.latest_epoch

    def release_through(self, epoch: int) -> None:
        """All work up to this epoch has ended: what was freed by then may leave."""
        self._opened().release_through(epoch)

    def _opened(self) -> _core.Pool:
        if self.pool is None:
            raise _core.StateConsistencyError("the pool of this engine is not open, or closed already")
        return self.pool

    def close(self) -> None:
        """Give all memory back. Idempotent. The addresses go when the engine's last tensor does."""
        pool, self.pool = self.pool, None
        ftensor, self._ftensor = self._ftensor, None
        _live.discard(self)
        if ftensor is None:
            return
        ftensor.synchronise()
        if pool is not None:
            pool.shutdown()
        else:
            ftensor.unmap(ftensor.mapped_pages())

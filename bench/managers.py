"""Our manager of blocks and the peer's under one face: how each comes to be, and what lies under its ids."""

from __future__ import annotations

import importlib
import inspect
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bench import peer as package

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 16
KV_BUFFERS = 2
GPU_CELL_BYTES = 2048  # of a token in one buffer: 8 heads of 128, in 16 bits; a block has 32 KiB
CPU_CELL_BYTES = 64  # the same number of blocks, in memory that a CI machine has
HEADS = 8
PEER_PAGE_BLOCKS = package.PEER_PAGE_BYTES // (BLOCK_TOKENS * GPU_CELL_BYTES)
ROUTES = ("vmm_ops", "interfaces")
READY_S = 15.0
READY_POLL_S = 0.05
SETTLED_S = 0.05
SETTLE_LIMIT_S = 5.0


class UnmeasuredError(Exception):
    """What was to be measured cannot be had; the message says why."""


class Shape(NamedTuple):
    """Buffers of a group, and the blocks in a page of ours; a page of the peer's has 64 in any shape."""

    layers: int
    page_blocks: int

    @property
    def buffers(self) -> int:
        return self.layers * KV_BUFFERS


def cell_bytes(device: str) -> int:
    return CPU_CELL_BYTES if device == "cpu" else GPU_CELL_BYTES


class Subject(Protocol):
    """What is measured."""

    manager: Any
    page_blocks: int
    page_bytes: int
    about: dict[str, Any]

    def pages_of(self, ids: Sequence[int]) -> Sequence[int]:
        """Page of each id."""

    def backed_bytes(self) -> int | None:
        """Memory under the pool; None where that cannot be told."""

    def close(self) -> None:
        """Give all of it back."""


class Ours:
    """`kvcached.KVCacheManager`."""

    def __init__(self, shape: Shape, pages: int, device: str) -> None:
        import kvcached
        from kvcached import vmm_ops
        from kvcached.kv_cache_manager import KVCacheManager

        cell = cell_bytes(device)
        self.page_bytes = shape.page_blocks * shape.buffers * BLOCK_TOKENS * cell
        self._ops = vmm_ops
        vmm_ops.init_kvcached(device, page_size=self.page_bytes)
        self.manager: Any = KVCacheManager(
            pages * shape.page_blocks, BLOCK_TOKENS, cell, shape.layers, num_kv_buffers=KV_BUFFERS
        )
        self.page_blocks = self.manager.geometry.blocks_per_page
        self.pages_of = self.manager.pages_of
        if self.page_blocks != shape.page_blocks:
            raise UnmeasuredError(f"a page has {self.page_blocks} blocks: {self.manager.layout}")
        self.about: dict[str, Any] = {"package": kvcached.__file__, "layout": self.manager.layout}

    def backed_bytes(self) -> int | None:
        return int(self.manager.stats()["mapped_bytes"])

    def close(self) -> None:
        self.manager.shutdown()
        self._ops.shutdown_kvcached()


class Peer:
    """The public package's manager, over tensors made by `route`."""

    page_blocks = PEER_PAGE_BLOCKS

    def __init__(self, shape: Shape, pages: int, device: str, route: str) -> None:
        kvcached = importlib.import_module("kvcached")
        self._taken: dict[str, str] = {}
        self.about: dict[str, Any] = {"package": kvcached.__file__, "route": route, "forms": self._taken}
        self.page_bytes = package.PEER_PAGE_BYTES * shape.buffers
        self._memory_info = self._open_device(device)
        known = self._known(shape, pages * PEER_PAGE_BLOCKS, device)
        self._ops = importlib.import_module("kvcached.vmm_ops")
        if route == "vmm_ops":
            package.init(self._ops, device, contiguous=True, taken=self._taken)
            size = known["num_blocks"] * BLOCK_TOKENS * known["cell_size"] * KV_BUFFERS
            self._tensors = package.create(self._ops, device, size, shape.layers, taken=self._taken)
            make: Any = importlib.import_module("kvcached.kv_cache_manager").KVCacheManager
        else:
            interfaces = importlib.import_module("kvcached.integration.vllm.interfaces")
            package.call_named(interfaces.init_kvcached, known, taken=self._taken)
            self._tensors = package.call_named(interfaces.alloc_kv_cache, known, taken=self._taken)
            make = interfaces.get_kv_cache_manager
        self._free_bytes = self._memory_info()
        start = time.monotonic()
        self.manager: Any = package.call_named(make, known, taken=self._taken)
        self._wait()
        self.about["ready_s"] = round(time.monotonic() - start, 2)
        self._tell_signatures()

    @staticmethod
    def _open_device(device: str) -> Any:
        """Asks for the free memory of the device, which is None on a CPU."""
        if device == "cpu":
            return lambda: None
        import torch

        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        return lambda: torch.cuda.mem_get_info()[0]

    @staticmethod
    def _known(shape: Shape, num_blocks: int, device: str) -> dict[str, Any]:
        """What a parameter of that name should be, wherever one stands."""
        import torch

        cell = cell_bytes(device)
        cache_shape = (KV_BUFFERS, num_blocks, BLOCK_TOKENS, HEADS, cell // (2 * HEADS))
        known: dict[str, Any] = dict.fromkeys(
            ("kvcache_shape", "kv_cache_shape", "kv_shape", "shape"), cache_shape
        )
        known |= dict.fromkeys(("world_size", "tp_size", "pp_size"), 1)
        known |= dict.fromkeys(("rank", "tp_rank", "pp_rank", "group_id"), 0)
        known |= {"async_sched": False, "reserve_null_block": False, "num_kv_buffers": KV_BUFFERS}
        known |= {"num_blocks": num_blocks, "block_size": BLOCK_TOKENS, "cell_size": cell}
        return known | {"num_layers": shape.layers, "device": device, "dtype": torch.bfloat16}

    def _wait(self) -> None:
        """Until it gives a block: it may begin its work in the background."""
        deadline, why = time.monotonic() + READY_S, "it answers None"
        while time.monotonic() < deadline:
            try:
                ids = self.manager.alloc(1)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                ids = None
            if ids:
                self.manager.free(ids)
                return
            time.sleep(READY_POLL_S)
        raise UnmeasuredError(f"no block within {READY_S:.0f} s: {why}")

    def _tell_signatures(self) -> None:
        for name in ("alloc", "free", "available_size"):
            try:
                self._taken[name] = str(inspect.signature(getattr(self.manager, name)))
            except (AttributeError, TypeError, ValueError) as error:
                self._taken[name] = f"{type(error).__name__}: {error}"

    def pages_of(self, ids: Sequence[int]) -> list[int]:
        return [block // PEER_PAGE_BLOCKS for block in ids]

    def backed_bytes(self) -> int | None:
        return None if self._free_bytes is None else self._free_bytes - self._memory_info()

    def close(self) -> None:
        """As its own engines end."""
        self._ops.shutdown_kvcached()


def settle(subject: Subject) -> None:
    """Waits until what works behind the manager has come to rest, as far as its memory tells."""
    deadline, seen = time.monotonic() + SETTLE_LIMIT_S, subject.backed_bytes()
    while seen is not None and time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        now = subject.backed_bytes()
        if now == seen:
            return
        seen = now


class Blocks:
    """What the measurement itself holds, page by page."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._manager = subject, subject.manager
        self._held: dict[int, list[int]] = {}

    def take(self, n: int) -> None:
        ids = self._manager.alloc(n)
        if ids is None or len(ids) != n:
            raise UnmeasuredError(f"alloc({n}) gave {'None' if ids is None else f'{len(ids)} ids'}")
        for block, page in zip(ids, self._subject.pages_of(ids), strict=True):
            self._held.setdefault(int(page), []).append(int(block))

    def free(self, page: int, blocks: slice) -> None:
        """Some of a page's blocks, by their place in it."""
        ids = self._held[page][blocks]
        del self._held[page][blocks]
        self._manager.free(ids)

    def forget(self, page: int) -> list[int]:
        """The ids of a page, which somebody else gives back."""
        return self._held.pop(page)

    def clear(self) -> None:
        ids = [block for blocks in self._held.values() for block in blocks]
        self._held.clear()
        if ids:
            self._manager.free(ids)

    def whole(self, count: int) -> list[int]:
        """That many pages, all of whose blocks are held."""
        page_blocks = self._subject.page_blocks
        for _ in range(8):
            pages = self._whole()
            if len(pages) >= count:
                return pages[:count]
            missing = (count - len(pages)) * page_blocks
            for start in range(0, missing, 16 * page_blocks):
                self.take(min(16 * page_blocks, missing - start))
        sizes = sorted({len(ids) for ids in self._held.values()})
        raise UnmeasuredError(
            f"{len(pages)} pages of {count} are held whole: blocks lie {sizes[:8]} a page, not {page_blocks}"
        )

    def _whole(self) -> list[int]:
        return [page for page, ids in self._held.items() if len(ids) == self._subject.page_blocks]

    def exhaust(self) -> list[int]:
        """All blocks there are; returns the pages that are held whole."""
        n = 16 * self._subject.page_blocks
        while n and (left := self._manager.available_size()) > 0:
            try:
                self.take(min(n, left))
            except UnmeasuredError:
                n //= 2
        return self._whole()

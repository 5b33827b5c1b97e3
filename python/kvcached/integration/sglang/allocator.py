"""The scheduler's side: SGLang's own allocators over ids of our ledger.

SGLang's methods stay, and with them its kernels: while one of them allocates, `free_pages` shows it exactly
the ids that it is to use, whose pages are backed. Ids are SGLang pages, tokens where the page size is 1.

What is freed comes as indices on the device. Reading them there would make the scheduler wait for the GPU, so
they are copied to the host behind the work that is queued, and reach the ledger when the copy is done. Until
then they are *pending*: free for whoever counts, and for whoever allocates worth a wait if nothing else is
left.

Two numbers, never mixed: `logical_size()` counts tokens that no request and no cached prefix holds, and is
what usage and leak checks compare; `available_size()` is what can be allocated as far as memory is known.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

from kvcached.errors import StateConsistencyError
from kvcached.integration.refusal import refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached import _core
    from kvcached.integration.memory import EngineMemory

__all__ = ["ElasticAllocator", "ElasticPagedAllocator", "ElasticTokenAllocator", "make_elastic"]

LEAVE_BYTES = 1 << 30
"""Of the device's room this much is not promised: the engine's other memory grows at times too."""


class Prefixes(Protocol):
    """What the scheduler caches."""

    def serve(self) -> None:
        """At the start of a pass: what is wanted of it, or too much, goes."""


class _Freed(NamedTuple):
    """Ids on their way to the host."""

    ids: torch.Tensor
    copied: torch.cuda.Event


class ElasticAllocator:
    """What both allocators have in common. Mixed in before SGLang's concrete class."""

    is_elastic = True

    memory: EngineMemory
    pool: _core.Pool
    prefixes: Prefixes | None = None
    """What the scheduler caches, where it can go when its memory is wanted."""
    refused: bool
    """Memory that was asked for in this pass of the scheduler could not be had."""

    page_size: int
    device: str
    is_not_in_free_group: bool
    _shown: torch.Tensor | None = None
    _pending: deque[_Freed]
    _pending_blocks: int
    _lacking: bool
    """Others may have been told that memory is wanted."""
    _settled: int
    """The last epoch after which nothing was queued."""

    def adopt(self, memory: EngineMemory) -> None:
        """Nothing of this allocator is in use yet: from now on its ids come from the memory's ledger."""
        self.memory = memory
        self.pool = memory.open_pool()
        self.refused = False
        self._pending, self._pending_blocks = deque(), 0
        self._settled = 0
        self._lacking = False

    # ------------------------------------------------------------ counting

    def available_size(self) -> int:
        """Tokens that can be allocated: free in backed pages, or in pages that the device was seen to have room for when
        a pass of the scheduler began. Makes no system call.
        """
        return (self.pool.promised_size() + self._pending_blocks) * self.page_size

    def logical_size(self) -> int:
        """Tokens that nobody holds, whatever memory there is for them. Lost pages count: nobody holds those either."""
        held = self.pool.held_size() - 1  # block 0 belongs to nobody
        return (self.pool.num_blocks - 1 - held + self._pending_blocks) * self.page_size

    @property
    def is_short(self) -> bool:
        """Memory, and not the number of tokens, bounds what can be allocated."""
        return self.available_size() < self.logical_size()

    def ask_device(self) -> None:
        """Look how much room the device has. One driver call."""
        self.pool.refresh_credit(LEAVE_BYTES)

    def secure(self, num_tokens: int) -> int:
        """Back memory for that many free tokens. They stay on hand until they are allocated or an epoch begins or ends.

        Returns:
            How many of them lack memory: 0 where all is well. Tokens that are not free at all are SGLang's business.
        """
        self.collect()
        blocks = min(-(-num_tokens // self.page_size), self.logical_size() // self.page_size)
        on_hand = self.pool.keep_on_hand(blocks)
        if on_hand < blocks and not self.refused:
            on_hand = self.pool.reserve_demand(blocks)
        if on_hand < blocks and self._pending:
            self.collect(wait=True)
            on_hand = self.pool.reserve_demand(blocks)  # a page that they emptied may have left already
        short = max(0, blocks - on_hand)
        self.refused = self.refused or short > 0
        return short * self.page_size

    def lack(self, num_tokens: int) -> None:
        """At the end of a pass: so many free tokens would be taken in all, were there memory for them. Others that share the device are told."""
        if num_tokens or self._lacking or self.refused:
            self.pool.lacks(-(-num_tokens // self.page_size))
            self._lacking = num_tokens > 0

    # ------------------------------------------------------------ allocating

    @property
    def free_pages(self) -> torch.Tensor:
        """Within an allocation the ids for it; at other times, for SGLang's checks, all that are free."""
        if self._shown is not None:
            return self._shown
        self.collect(wait=True)
        free = [block for block in self.pool.free_ids() if block != 0]
        return torch.tensor(free, dtype=torch.int64).to(self.device)

    @free_pages.setter
    def free_pages(self, pages: torch.Tensor) -> None:
        if self._shown is not None:  # else SGLang sets up a free list of its own, which nobody reads
            self._shown = pages

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Indices of `need_size` tokens, whole pages; None, and nothing changed, where that many cannot be had."""
        native = super().alloc  # type: ignore[misc]
        return self._issue(need_size // self.page_size, lambda: native(need_size))

    def _issue(self, num_pages: int, native: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Let SGLang's own method hand out exactly `num_pages` ids."""
        ids = self._take(num_pages)
        if ids is None:
            return None
        self._shown = ids.to(self.device, non_blocking=True)
        indices = None
        try:
            indices = native()
            left = len(self._shown)
        finally:
            self._shown = None
            if indices is None:
                self.pool.free(ids.numpy())
        if indices is not None and left:
            raise StateConsistencyError(
                f"SGLang took {num_pages - left} pages of the {num_pages} that it needs"
            )
        return indices

    def _take(self, num_pages: int) -> torch.Tensor | None:
        """So many ids, on the host. The core writes them where the device copies them from."""
        ids = torch.empty(num_pages, dtype=torch.int64, pin_memory=self._on_gpu)
        self.collect()
        had = self.pool.alloc_into(ids.numpy())
        if not had and self._pending:
            self.collect(wait=True)
            had = self.pool.alloc_into(ids.numpy())
        self.refused = self.refused or (not had and num_pages * self.page_size <= self.logical_size())
        return ids if had else None

    @property
    def _on_gpu(self) -> bool:
        return bool(torch.device(self.device).type == "cuda")

    # ------------------------------------------------------------ freeing

    def give(self, ids: torch.Tensor) -> None:
        """These pages are free. The tensor may be changed by work that is queued after this call."""
        if not self._on_gpu:
            self.pool.free(ids.numpy())
            return
        on_host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        on_host.copy_(ids, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._pending.append(_Freed(on_host, copied))
        self._pending_blocks += len(ids)

    def collect(self, *, wait: bool = False) -> None:
        """Bring pending ids to the ledger: those that have arrived, or all.

        Raises:
            BlockError: ids that were not allocated, or are freed twice.
        """
        while self._pending and (wait or self._pending[0].copied.query()):
            freed = self._pending.popleft()
            freed.copied.synchronize()
            self._pending_blocks -= len(freed.ids)
            self.pool.free(freed.ids.numpy())

    def settle(self) -> None:
        """Nothing is queued and every result was processed: whatever was freed leaves now."""
        if self._pending or self._settled < self.memory.latest_epoch:
            self.memory.synchronise()
            self.collect(wait=True)
            self._settled = self.memory.latest_epoch
            self.memory.release_through(self._settled)

    def clear(self) -> None:
        """Nothing is held any more, in whatever state this allocator is; waits for the GPU."""
        super().clear()  # type: ignore[misc]
        self._pending.clear()
        self._pending_blocks = 0
        self.pool.clear()

    def _copied_in_group(self, free_index: torch.Tensor) -> torch.Tensor:
        """Inside a group SGLang keeps what is freed, often a view of a table that is rewritten before the group ends."""
        return free_index if self.is_not_in_free_group else free_index.clone()

    def resize(self, config: Any) -> None:
        """SGLang's sizing after graph capture, which an elastic pool has no use for."""
        refuse("sizing the KV cache after graph capture (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING)")


class ElasticTokenAllocator(ElasticAllocator, TokenToKVPoolAllocator):  # type: ignore[misc]
    """Page size 1: a token is a page."""

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.is_not_in_free_group:
            self.give(free_index)
        else:
            super().free(free_index.clone())  # as in `_copied_in_group`


class ElasticPagedAllocator(ElasticAllocator, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """Pages of several tokens."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Indices (extend_num_tokens,) of the new tokens of every request, which fill its last page first."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc)
        native = super().alloc_extend
        return self._issue(num_new_pages, lambda: native(*lens, extend_num_tokens, num_new_pages))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Indices (requests,) of one more token of every request."""
        num_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        native = super().alloc_decode
        return self._issue(num_pages, lambda: native(seq_lens, seq_lens_cpu, last_loc))

    def free(self, free_index: torch.Tensor) -> None:
        super().free(self._copied_in_group(free_index))

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        super().free_segment(self._copied_in_group(free_index), start_pos=start_pos)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        self.give(torch.cat(page_ids))


_ELASTIC: dict[type, type[ElasticAllocator]] = {
    TokenToKVPoolAllocator: ElasticTokenAllocator,
    PagedTokenToKVPoolAllocator: ElasticPagedAllocator,
}


def make_elastic(allocator: Any, memory: EngineMemory) -> ElasticAllocator:
    """The same allocator, fed from `memory`, in place of one that was just built and that nobody else knows.

    Raises:
        UnsupportedConfiguration: an allocator of another class than the two that we know.
    """
    elastic = _ELASTIC.get(type(allocator))
    if elastic is None:
        refuse(f"allocator {type(allocator).__name__}")
    if allocator.need_sort:
        refuse("disaggregated prefill and decode")
    made = elastic.__new__(elastic)
    vars(made).update(vars(allocator))
    del vars(made)["free_pages"]  # the list that SGLang has just filled
    made.adopt(memory)
    return made

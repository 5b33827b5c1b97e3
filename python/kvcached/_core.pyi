"""The compiled core. Private: use `kvcached`, `kvcached.vmm_ops` and `kvcached.errors`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer as _ReadableBuffer
from typing_extensions import Self

__version__: str

# Block or page ids: a list, a tuple or anything else that yields ints, or a one-dimensional buffer of integers (a numpy array,
# an `array.array`, a `memoryview`; `.numpy()` of a torch tensor on the CPU, which has no buffer protocol of its own and is
# read item by item). A list is read at some 5 ns an id, a buffer at 1 to 2. `TypeError` for anything else.
_Ids: TypeAlias = Iterable[SupportsIndex] | _ReadableBuffer

_LimitState: TypeAlias = Literal["applied", "deferred", "rejected", "stale", "conflict"]
_Outcome: TypeAlias = Literal["applied", "deferred", "rejected", "stale", "conflict", "unanswered"]

class KVCachedError(RuntimeError): ...
class KVCachedConfigError(KVCachedError, ValueError): ...
class GeometryError(KVCachedConfigError): ...
class DriverUnavailableError(KVCachedError): ...
class DriverError(KVCachedError): ...
class KVCachePoolExhausted(KVCachedError): ...
class MapQuarantinedError(KVCachedError): ...
class QuarantinedResizeError(MapQuarantinedError): ...
class StateConsistencyError(KVCachedError): ...
class BlockError(KVCachedError, ValueError): ...

@final
class Geometry:
    """Where the blocks of a group lie: pure arithmetic, no memory.

    All sizes in bytes. `blocks_per_page` is m, `ids_per_page` the stride of ids from page to page.
    """

    @staticmethod
    def solve(
        num_buffers: int,
        block_bytes: int,
        granularity: int,
        *,
        page_bytes: int | None = None,
        tokens_per_block: int = 1,
        layout: str = "chunked",
        num_blocks: int | None = None,
        waste_permille: int = 20,
        cell_align: int | None = None,
    ) -> Geometry:
        """Choose a page for `num_buffers` buffers of `block_bytes` blocks.

        `page_bytes` None: the candidate nearest 16 MiB whose padding is at most `waste_permille`, else the least padding up to
        128 MiB. A given `page_bytes` is taken as a target of at least that many bytes. `layout` "chunked": one handle a page,
        sparse ids; "per-layer": one handle a buffer and page, dense ids. `num_blocks`: a capacity whose ids and slots must fit
        int32. `cell_align`: the block is a super-cell (`pack_cell`), whose stride may be padded to multiples of so many bytes.
        Raises `GeometryError`.
        """
    @staticmethod
    def pack_cell(components: Sequence[tuple[int, int]]) -> tuple[list[int], int, int]:
        """A super-cell of components, (bytes, alignment) each: the offsets at which they lie in it, its bytes and its
        alignment. Raises `GeometryError`.
        """
    @property
    def layout(self) -> str:
        """ "chunked" or "per-layer"."""
    @property
    def num_buffers(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """From one block to the next in a buffer; padding of a super-cell included."""
    @property
    def content_bytes(self) -> int:
        """Of a block, without the padding of a super-cell."""
    @property
    def page_bytes(self) -> int:
        """Physical memory of a page, all its handles together."""
    @property
    def runs_per_page(self) -> int:
        """Handles of a page: 1, or one a buffer in the per-layer layout."""
    @property
    def run_bytes(self) -> int:
        """Bytes of each."""
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def waste_bytes(self) -> int:
        """Padding of one page."""
    @property
    def blocks_per_page(self) -> int: ...
    @property
    def ids_per_page(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    def with_block(self, block_bytes: int, *, tokens_per_block: int = 1) -> Geometry:
        """The same pages and chunks seen in blocks of another size, which must divide both. Raises `GeometryError`."""
    def explain(self) -> str:
        """One line that says what was chosen and why."""
    def num_pages(self, num_blocks: int) -> int:
        """Pages that hold `num_blocks` usable blocks."""
    def id_space(self, num_blocks: int) -> int:
        """Rows of every buffer. Raises `GeometryError` where an id or a slot (id x tokens) would not fit int32."""
    def block_id(self, index: int) -> int:
        """Sparse id of the `index`-th usable block."""
    def index(self, block_id: SupportsIndex) -> int:
        """Inverse of `block_id`. Raises `BlockError` for an id that no block has."""
    def pages_of_row(self, block_id: SupportsIndex) -> range:
        """Pages that back row `block_id` of every buffer, for any row: also ids that no block has. Raises `BlockError` for a
        negative one or one beyond 32 bits.
        """

@final
class Buffer:
    """Bytes of an `FTensor` as one int8 tensor: a DLPack exporter (versioned and legacy capsules) that keeps the range alive."""

    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of its elements; strides may leave others between them."""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class FTensor:
    """A reserved range of addresses with memory under some of its pages.

    `device` is "cuda:N", "hip:N" or "cpu". `unbacked`: what lies under a page without memory, "hole" (touching it is an error of
    the device) or "zero" (it reads as zeros; writing is an error of the device; changing a page waits for the device first).
    `cache_bytes`: memory of released pages to keep for the next ones. Thread-safe; the GIL is released around driver calls.
    A fork of the process has none of the memory: there all but what was fixed at the start raises `DriverError`.
    """

    def __init__(
        self,
        device: str,
        geometry: Geometry,
        num_blocks: int,
        *,
        unbacked: str = "hole",
        cache_bytes: int = 0,
    ) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def id_space(self) -> int: ...
    @property
    def virtual_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def unbacked(self) -> str: ...
    @property
    def cached_bytes(self) -> int:
        """Memory kept for later pages."""
    @property
    def leaked_bytes(self) -> int:
        """Memory whose release failed; tried again by later calls and at the end."""
    @property
    def retained_bytes(self) -> int:
        """Memory that the pending transaction keeps."""
    @property
    def zero_bytes(self) -> int:
        """The zeros under unbacked pages."""
    @property
    def pending_transaction(self) -> int | None: ...
    def mapped_pages(self) -> list[int]: ...
    def quarantined_pages(self) -> list[int]: ...
    def buffers(self) -> list[Buffer]:
        """Each buffer: 1-D, `id_space * block_bytes` bytes."""
    def component(self, buffer: int, offset: int, nbytes: int) -> Buffer:
        """`nbytes` of every block of a buffer, from `offset` on: (id_space, nbytes), rows `block_bytes` apart. A component of a
        super-cell. Raises `KVCachedConfigError`.
        """
    def halves(self, buffer: int) -> Buffer:
        """A buffer and the next as the halves of one tensor, K and V: (2, id_space * block_bytes); contiguous in the per-layer
        layout. One page id backs both. Raises `KVCachedConfigError`.
        """
    def map(self, pages: _Ids) -> list[int]:
        """Back these pages, all or none; returns those that were not backed before.

        Raises `KVCachePoolExhausted` when the driver is out of memory, `MapQuarantinedError` when an undo failed,
        `DriverError` otherwise, `ValueError` for a page outside the range.
        """
    def unmap(self, pages: _Ids) -> None:
        """Give these pages back. Synchronise first where GPU work may read them.

        Raises `StateConsistencyError` for a page that is not backed (nothing changed). Where the driver refuses the message says
        where each page stands: `MapQuarantinedError` if some are lost, else `DriverError`.
        """
    def prepare_unmap(self, transaction: int, pages: _Ids) -> None:
        """Unmap these pages and keep their memory, all or none. One transaction at a time; each has a greater number than those
        before. Repeating it does nothing.

        Raises `StateConsistencyError` where it may not follow what came before or a page is not backed (nothing changed). Where
        the driver refuses everything is mapped again, but for pages lost by that: `MapQuarantinedError` names them, and
        without any it is a `DriverError`.
        """
    def commit_unmap(self, transaction: int) -> None:
        """Release the memory of a prepared transaction. Raises `DriverError` where some could not be released: commit again."""
    def abort_unmap(self, transaction: int) -> None:
        """Map the memory of a prepared transaction back, with its content; remembered where the prepare is still to come.
        Raises `MapQuarantinedError` where pages were lost by that.
        """
    def trim(self) -> int:
        """Release the memory kept for later pages; returns bytes."""
    def synchronise(self) -> None:
        """Wait for all work on the device."""

@final
class RankServer:
    """Serves the memory of one worker process to its engine's coordinator, over a socket in the user's own directory
    (`$XDG_RUNTIME_DIR/kvcached`, else `/tmp/kvcached-<uid>`). One a process, for all its groups; threads of its own.

    Pages of an `FTensor` that was added are mapped and unmapped by the coordinator alone. Raises `KVCachedConfigError` where the
    directory is not the user's own or is open to others. In a fork of the process calls raise `DriverError`.
    """

    def __init__(self, *, stage: int = 0, rank: int = 0) -> None: ...
    def add_group(self, ftensor: FTensor, group: int = 0) -> None:
        """Serve this group from now on. Raises `KVCachedConfigError` where it is served already."""
    @property
    def address(self) -> str:
        """Path of the socket."""
    @property
    def stage(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def answer(self, frame: bytes) -> bytes:
        """The answer to a frame of `Ranks.over_callable`, after the work that it asks for. Raises `DriverError` for what is no
        frame, `StateConsistencyError` where another coordinator took over meanwhile.
        """
    def take_times(self, group: int = 0) -> list[tuple[str, float]]:
        """What was done to the group's memory since the last call, and how long each took: ("map", seconds). At most the latest 4096."""
    def stop(self) -> None:
        """End in order: the socket, the threads and an undecided transaction. Waits for work that is under way. Idempotent."""

@final
class Ranks:
    """The coordinator's end of one group: the `RankServer`s of all its workers, as one. Thread-safe.

    `addresses`: (stage, rank, path of its socket) of each. `keep`: pages that stay mapped where all ranks have them; all others are
    unmapped when it begins. `timeout_s`: a rank that is silent for so long is lost, and asked again after half of it; None:
    `KVCACHED_IPC_TIMEOUT`. A rank that is lost breaks the group for good: `StateConsistencyError` names it.
    In a fork of the process calls raise `DriverError`.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[int, int, str]],
        *,
        group: int = 0,
        keep: _Ids | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`keep` None: page 0. Raises `KVCachedError` where a rank cannot be reached, `StateConsistencyError` where it does not
        answer or is made of something else than the others.
        """
    @staticmethod
    def over_callable(
        call: Callable[[int, int, bytes], bytes],
        members: Sequence[tuple[int, int]],
        *,
        group: int = 0,
        keep: _Ids | None = None,
        timeout_s: float | None = None,
    ) -> Ranks:
        """The same through an engine's own RPC: `call(stage, rank, frame)` has that worker do `RankServer.answer(frame)` and returns
        what it returned. Called from one thread for each member. An exception is the loss of that rank.
        """
    @property
    def num_members(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def blocks_per_page(self) -> int: ...
    @property
    def ids_per_page(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """Of the rank whose pages are the largest."""
    @property
    def virtual_bytes(self) -> int:
        """Of the rank that has the most."""
    @property
    def beside_bytes(self) -> int:
        """Memory beside the pages, of the rank that has the most."""
    @property
    def broken(self) -> str | None:
        """Why the group is broken, if it is: known as soon as a rank's process ends, also while nothing is asked."""
    def map(self, pages: _Ids) -> list[int]:
        """Back these pages on all ranks, or on none; returns those that were not backed before.

        Raises `KVCachePoolExhausted` when a rank is out of memory, `MapQuarantinedError` when an undo failed, `DriverError` when a
        driver refused, `StateConsistencyError` where the group is broken, `ValueError` for a page outside it.
        """
    def unmap(self, pages: _Ids) -> None:
        """Give these pages back on all ranks, or on none; each waits for its device first. Raises as `map` does."""
    def synchronise(self) -> None:
        """Wait for all work on every rank's device."""
    def room(self) -> int:
        """Bytes that every rank's device could give now."""
    def trim(self) -> int:
        """Have every rank release the memory kept for later pages; returns bytes."""
    def close(self) -> None:
        """End in order; what is mapped stays mapped. Idempotent; calls raise `KVCachedError` afterwards."""

class Pool:
    """A ledger over an `FTensor`, or over `Ranks` that have one each: hands out block ids of backed pages. Thread-safe.

    `geometry`, `num_blocks`: where the pool's blocks differ from those the `FTensor` was made for (see `Geometry.with_block`); needed
    over `Ranks`.
    `reserve_null_block`: id 0 is taken and backed for good. `async_sched`: emptied pages stay mapped until `release_through`.
    `record`: shows the pool to others. Where that shares devices (`InstanceRecord.share`) and the pool is `charged`, its memory counts
    there: what is refused reads as memory that is short.
    A thread of the pool's own backs pages ahead of allocations and gives memory back behind whoever freed it: see `quiesce`.
    Dropping the last reference shuts it down.
    In a fork of the process, which has none of the memory, calls raise `DriverError`.
    """

    def __new__(
        cls,
        memory: FTensor | Ranks,
        *,
        geometry: Geometry | None = None,
        num_blocks: int | None = None,
        reserve_null_block: bool = False,
        async_sched: bool = False,
        min_reserved_bytes: int = 0,
        max_reserved_bytes: int = 48 << 20,
        highest_pages_first: bool = False,
        record: InstanceRecord | None = None,
        pool_name: str | None = None,
        charged: bool = True,
    ) -> Self: ...
    @property
    def memory(self) -> FTensor | Ranks: ...
    @property
    def ftensor(self) -> FTensor:
        """Raises `AttributeError` where the pool is over `Ranks`."""
    @property
    def geometry(self) -> Geometry: ...
    @property
    def num_blocks(self) -> int:
        """Usable blocks, the null block included."""
    @property
    def id_space(self) -> int:
        """Bound of block ids."""
    @property
    def null_block(self) -> int | None: ...
    def alloc(self, n: SupportsIndex) -> list[int] | None:
        """Exactly n ids, ascending within a page, or None (and nothing changed) when memory or ids are short. Raises
        `ValueError` for a negative n.
        """
    def alloc_array(self, n: SupportsIndex) -> npt.NDArray[np.int64] | None:
        """As `alloc`, into a new array (n,), which owns its memory. Raises `KVCachedConfigError` where numpy is not installed."""
    def alloc_into(self, out: _ReadableBuffer) -> bool:
        """As many ids as `out` has items, written into it: a writable, contiguous, one-dimensional array of 32- or 64-bit
        integers (of a torch tensor on the CPU: `.numpy()`). False, and nothing written, when memory or ids are short.
        Raises `TypeError`, before anything is allocated, for an array that takes no ids.
        """
    def free(self, ids: _Ids) -> None:
        """Give ids back. Raises `BlockError` (nothing changed) for a double free or an id never issued."""
    def claim(self, ids: _Ids) -> None:
        """Take these very ids, which must be free; their pages are backed. Raises `BlockError` or `KVCachePoolExhausted`, nothing changed."""
    def available_size(self) -> int:
        """Blocks that may still be allocated: free blocks of backed and of unbacked pages."""
    def refresh_credit(self, leave_bytes: int = 0) -> int:
        """Ask the device for its room and count it, less `leave_bytes`, as credit until pages are backed from it, the device
        refuses one, or the next call. Others may take that memory meanwhile. Returns `promised_size()`.
        """
    def promised_size(self) -> int:
        """Blocks that an `alloc` can have as far as memory is known: free ones in backed pages and those of pages covered by
        credit. Makes no system call.
        """
    def held_size(self) -> int:
        """Blocks that somebody holds, the null block among them."""
    def free_ids(self) -> list[int]:
        """Every free block of the pool, backed or not. Walks all pages: for checks."""
    def backed_size(self) -> int:
        """Free blocks in backed pages: an `alloc` of that many makes no driver call and cannot fail."""
    def reserve_demand(self, n: SupportsIndex) -> int:
        """Back pages until n free blocks are on hand; returns how many are, at most n. Never raises for lack of memory."""
    def lacks(self, n: SupportsIndex) -> None:
        """Who was refused memory would take n free blocks in all, if it had them: others that share the device are asked for that much, up to
        what this pool could hold, in place of what was refused. To be said again within a second. 0: it has found another way.
        """
    def try_to_reserve(self, n: SupportsIndex) -> bool:
        """Set n blocks aside for the next `alloc` calls, all or none."""
    def free_reserved(self) -> None:
        """Give back what `try_to_reserve` set aside and was not used."""
    def begin_epoch(self) -> int:
        """A batch is about to be submitted: pages emptied from now on wait for it. Returns its marker."""
    def release_through(self, marker: int) -> None:
        """All GPU work up to this marker has ended: pages retired by then leave in the background, but for the reserve. Pages that
        were allocated from meanwhile stay.
        """
    def keep_on_hand(self, n: SupportsIndex) -> int:
        """How many of n free blocks are on hand. They stay there until they are allocated, the next epoch begins or ends, or,
        where there are no epochs, a page is emptied. Makes no driver call.
        """
    def quiesce(self, timeout_s: float = 10.0) -> bool:
        """Wait until the background thread has nothing to do: what was freed has been given back. False after `timeout_s`."""
    def set_memory_limit(
        self, limit_bytes: SupportsIndex, *, revision: SupportsIndex | None = None
    ) -> tuple[_LimitState, int, int, int, str | None]:
        """Have at most `limit_bytes` of memory under the pages; what is above all that is reserved counts as that. Growth is
        immediate; a smaller limit holds for what is allocated from now on, and what is held beyond it goes as blocks are freed.
        No live block is revoked, and the page of the null block stays.

        `revision`: greater than that of the limit that stands; None: the next. Returns what `memory_limit_state` does, but with
        "stale" where a later revision stands, "conflict" where this revision stands with another limit, "rejected" where lost
        pages hold more: nothing was changed then. Raises `KVCachedConfigError` for what is no int from 0 on.
        """
    def memory_limit_state(self) -> tuple[_LimitState, int, int, int, str | None]:
        """The limit that stands: "applied", or "deferred" while more is held, or "rejected" where lost pages hold more since; its
        revision (0: never set), its bytes, the bytes of mapped and lost pages, and why it is rejected.
        """
    def trim(self) -> int:
        """Unmap the reserve and give back memory kept for later pages; returns bytes given back."""
    def clear(self) -> None:
        """Forget every allocation but the null block; synchronises the device, keeps the reserve."""
    def shutdown(self) -> int:
        """Unmap everything; ends in time whatever the device does. Raises where something stays mapped; another call tries again
        what is left. Returns the bytes of lost pages. Tensors already exported keep their addresses; touching them afterwards is an
        error of the caller. Idempotent.
        """
    def get_page_occupancy(self, page_ids: _Ids) -> list[tuple[int, int]]:
        """(blocks held, blocks usable) of each page. Raises `ValueError` for a page outside the pool."""
    def pages_of(self, ids: _Ids) -> list[int]:
        """Page of each id. Raises `BlockError` for one that no block has."""
    def emptied_by(self, ids: _Ids) -> int:
        """Pages that would hold nothing, were exactly these held blocks freed: what evicting them gives back. Raises `BlockError`
        where `free` would.
        """
    def stats(self) -> dict[str, int]:
        """Pages by state; blocks; pages since the start by who backed them or gave them back (on demand: callers; ahead and behind:
        the pool's own thread); bytes: used_bytes, reserved_bytes, virtual_bytes, mapped_bytes (the first two together),
        beside_bytes (zeros, memory kept for later pages), quarantined_bytes.
        """

@final
class InstanceRecord:
    """This process as others see it: one mapped file, mode 0600, removed at the end. Raises `KVCachedConfigError` for a bad or a taken
    name, and for a limit below the minimum.

    `limit_bytes`: the most that it may have of each of its devices, None for no limit. `min_bytes`: guaranteed to it. Others may
    change both (`ask`).
    """

    def __init__(
        self, name: str, engine: str, device: str, *, limit_bytes: int | None = None, min_bytes: int = 0
    ) -> None: ...
    def terms(self) -> tuple[int | None, int]:
        """Limit and minimum in force, bytes."""
    def share(
        self,
        devices: Sequence[tuple[str, int]],
        *,
        budget_bytes: int | None = None,
        free_watermark_bytes: int = 0,
        cache_idle_s: float = 0.0,
    ) -> None:
        """Take part in the budgets of these devices, once: (`identity`, all that it has in bytes) of each rank, what a rank holds being
        charged on all of them. From now on a thread gives memory back to other instances that wait for it, and puts in force what
        `ask` asks for; pools that are made with this record and `charged` are its to look after.

        `budget_bytes`: what all instances may have of each device together; None: what stands, or the whole device.
        `free_watermark_bytes`, `cache_idle_s`: cached prefixes go back when less of the device is free, and after so many seconds without
        an allocation; 0: never.

        Raises `KVCachedConfigError` where others live by another budget, where the minimum does not fit beside theirs, and for a second
        call.
        """
    @property
    def shared_devices(self) -> list[str] | None: ...
    def set_cached(self, give: Callable[[int], int], nbytes: Callable[[], int]) -> None:
        """How cached prefixes go: `give(bytes)` has pages of that many bytes empty and returns how many did, `nbytes()` says how
        many there may be. Called by a thread of this record's own; what they raise is logged.
        """
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    def close(self) -> None:
        """End the thread, leave the budgets, remove the file. Idempotent."""

def backend_available(backend: str) -> str | None:
    """None where backend "cuda", "hip" or "host" can be used, else why it cannot."""

def granularity(device: str) -> int:
    """Smallest physical allocation of the device, bytes."""

def identity(device: str) -> str:
    """Which piece of hardware the device is, the same in every process: "GPU-<uuid>" as `nvidia-smi -L` prints it, or "host"."""

def mem_info(device: str) -> tuple[int, int]:
    """(free, total) bytes of the device."""

def live_ranges() -> int:
    """Ranges of addresses that this process has reserved and not freed."""

def instances() -> list[dict[str, Any]]:
    """All live instances of this user: the fields of `kvcached.control.Instance`."""

def budgets() -> list[dict[str, Any]]:
    """All devices that instances share: the fields of `kvcached.control.Budget`."""

def metric_families(
    instances: Sequence[str] | None = None,
) -> list[
    tuple[
        str,
        str,
        Literal["gauge", "counter", "histogram"],
        list[tuple[dict[str, str], int | tuple[list[tuple[float, int]], float]]],
    ]
]:
    """What instances hold, count and time, of these names or all: the fields of `kvcached.observability.MetricFamily`."""

def ask(
    name: str,
    *,
    limit: tuple[int | None] | None = None,
    min_bytes: int | None = None,
    revision: int | None = None,
    wait_s: float = 5.0,
) -> tuple[_Outcome, int, int | None, int]:
    """Ask an instance for another limit, in a tuple, or minimum; what is None stays. Returns the fields of `kvcached.control.Answer`.
    Raises `KVCachedConfigError` for an instance that is not there and terms that contradict.
    """

def kvctl(args: Sequence[str]) -> int:
    """Run `kvctl`; returns its exit code."""

"""A rank's half of an engine's elastic memory: the addresses of its KV cache, and the memory under them.

It is where the engine's worker is, in the process of its scheduler or in one of its own. Knows no engine: what an engine laid out
reaches it as a `Plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached import _core
from kvcached.instance import hardware
from kvcached.integration.attached import Attached
from kvcached.integration.kernels import Kernels, choose
from kvcached.integration.plan import Survey
from kvcached.integration.refusal import UnsupportedConfiguration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcached.integration.launch import Launch
    from kvcached.integration.own_use import OwnUse
    from kvcached.integration.plan import Plan

__all__ = ["RankMemory"]


class RankMemory(Attached):
    """What one worker of an engine has of us.

    A worker meets it in this order: at its start (`obstacle`), when the model is loaded (`attended_by`, `survey`), when the KV cache is agreed
    (`reserve`, `serve`) and allocated (`tensors`), in warm-up (`back_rows`, `unback`), at the end (`close`). From the scheduler's pool on
    that alone maps and unmaps.
    """

    _attribute = "_kvcached_rank"

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.obstacle: Exception | None = None
        """Why this worker cannot have elastic memory, where that is known before anybody asks."""
        self.plan: Plan | None = None
        self.own_use: OwnUse | None = None
        self._backends: frozenset[str] = frozenset()
        self._ftensor: _core.FTensor | None = None
        self._server: _core.RankServer | None = None
        self._on_refusal: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (_in_another_process, (self.launch,))

    # ------------------------------------------------------------ what it is for

    def attended_by(self, backends: Iterable[str]) -> None:
        """The attention backends that will run on this memory, by the names of `kvcached.kernel_records`."""
        self._backends = frozenset(backends)

    def survey(self, device: str) -> Survey:
        """What this rank asks of the plan.

        Args:
            device: where it lies, "cuda:N" or "cpu".
        """
        kernels = Kernels(self.launch.engine, self.launch.version, self._backends)
        ground = choose(self.launch.settings, kernels, device)
        return Survey(device, _core.granularity(device), ground, hardware(device))

    # ------------------------------------------------------------ refusal

    def on_refusal(self, undo: Callable[[], None]) -> None:
        """Have `undo` called if this engine turns out to be one that runs natively."""
        self._on_refusal.append(undo)

    def refuse(self) -> None:
        """The engine runs natively after all: undo what its worker has seen of us, newest first."""
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

    def reserve(self, plan: Plan, device: str) -> None:
        """Reserve the addresses of all buffers and back page 0, where the null block lies.

        Raises:
            KVCachedError: the driver refused.
        """
        self.close()
        ftensor = _core.FTensor(
            device,
            plan.geometry(),
            plan.agreement.num_blocks,
            unbacked=plan.ground.unbacked,
            cache_bytes=self.launch.settings.handle_cache_bytes,
        )
        ftensor.map([0])
        self.plan, self._ftensor = plan, ftensor

    def tensors(self) -> dict[str, Any]:
        """The bytes of each buffer: a flat int8 torch tensor of exactly `id_space` blocks, a storage of its
        own.
        """
        import torch

        buffers = map(torch.from_dlpack, self.ftensor.buffers())
        assert self.plan is not None
        return dict(zip(self.plan.agreement.buffers, buffers, strict=True))

    def back_rows(self, ids: Iterable[int]) -> list[int]:
        """Back the pages behind these rows of every buffer; returns those that were not backed before."""
        ftensor = self.ftensor
        pages = {page for row in set(ids) for page in ftensor.geometry.pages_of_row(row)}
        return ftensor.map(sorted(page for page in pages if page < ftensor.num_pages))

    def unback(self, pages: Iterable[int]) -> None:
        """Take back what `back_rows` backed, once all GPU work has ended. Page 0 stays."""
        self.ftensor.synchronise()
        self.ftensor.unmap(sorted(set(pages) - {0}))

    # ------------------------------------------------------------ its scheduler

    def open(self) -> _core.FTensor:
        """What the pool of a scheduler in this process draws from."""
        return self.ftensor

    def serve(self, rank: int) -> str:
        """Let the pool of a scheduler in another process map and unmap.

        Args:
            rank: this one's number.

        Returns:
            The address at which it is reached.
        """
        self._server = _core.RankServer(rank=rank)
        self._server.add_group(self.ftensor)
        return self._server.address

    @property
    def address(self) -> str | None:
        """Where it is reached by a scheduler in another process; None where there is none."""
        return None if self._server is None else self._server.address

    def stop_serving(self) -> None:
        """This worker ends: nobody reaches it any more, and its socket is gone. Its memory goes with the process. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def synchronise(self) -> None:
        """Wait for all work on the device."""
        self.ftensor.synchronise()

    def close(self, pool: _core.Pool | None = None) -> None:
        """Give all memory back. Idempotent. The addresses go when the engine's last tensor does.

        Args:
            pool: drew from it, and ends with it.
        """
        self.stop_serving()
        ftensor, self._ftensor = self._ftensor, None
        if ftensor is None:
            return
        ftensor.synchronise()
        if pool is not None:
            pool.shutdown()
        else:
            ftensor.unmap(ftensor.mapped_pages())


def _in_another_process(launch: Launch) -> RankMemory:
    """A worker's config has arrived: its process has a rank of its own, which can do nothing before the seams are in place there."""
    rank = RankMemory(launch)
    rank.obstacle = UnsupportedConfiguration(
        "a worker process in which kvcached's plug-in did not run (KVCACHED_AUTOPATCH=false keeps it out) cannot have elastic memory"
    )
    return rank

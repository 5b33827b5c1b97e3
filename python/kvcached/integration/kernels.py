"""What an engine's attention kernels were shown to bear, and which tensors they are given for it.

Two things are asked of a kernel that runs on our addresses: that it leaves alone what it was not given (holes), and
that it reaches the highest block ids, of which the chunked layout has many times more than an engine natively has.
`python -m kvcached.verify_kernels` shows both on a device and records it; a kernel of which nothing is known gets zeros to read
and dense ids, which cost time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached import kernel_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.config import Settings

__all__ = ["Ground", "Kernels", "choose", "weakest"]


@dataclass(frozen=True)
class Kernels:
    """The attention backends of one engine, by the names that `kvcached.kernel_records` uses.

    Args:
        engine: "vllm" or "sglang".
        version: of the engine.
        backends: all that its layers use; none where nobody has said.
    """

    engine: str
    version: str
    backends: frozenset[str]


@dataclass(frozen=True)
class Ground:
    """What the KV cache of an engine lies on: `layout` "chunked" or "per-layer", `unbacked` "hole" or "zero".

    `warning`: what the user should be told about it, or nothing.
    """

    layout: str
    unbacked: str
    warning: str = field(default="", compare=False)


def choose(settings: Settings, kernels: Kernels, device: str) -> Ground:
    """What `settings` say, and where they say "auto" what the kernels were shown to bear on this device.

    Args:
        settings: of this process.
        kernels: of the engine.
        device: "cuda:N" or "cpu".
    """
    layout, unbacked = settings.layout, settings.unbacked
    if "auto" not in (layout, unbacked):
        return Ground(layout, unbacked)
    name, machine = kernel_records.device_name(device), kernel_records.machine_of(device)
    known = {
        backend: kernel_records.lookup(kernels.engine, kernels.version, backend, name, machine)
        for backend in kernels.backends or {"unknown"}
    }
    reach, leave = [], []  # of whom it was asked and not shown
    if layout == "auto":
        reach = [backend for backend, record in known.items() if record is None or not record.top_ids]
        layout = "per-layer" if reach else "chunked"
    if unbacked == "auto":
        leave = [backend for backend, record in known.items() if record is None or not record.hole_safe]
        unbacked = "zero" if leave else "hole"
    unproven = sorted({*reach, *leave})
    if not unproven:
        return Ground(layout, unbacked)
    lacks = [*["reach the highest block ids"] * bool(reach), *["leave holes alone"] * bool(leave)]
    return Ground(
        layout,
        unbacked,
        f"attention backend {', '.join(unproven)} of {kernels.engine} {kernels.version} was not shown on {name} to "
        f"{' and to '.join(lacks)}: layout {layout}, unbacked memory {unbacked}. `python -m kvcached.verify_kernels` shows "
        "it or not, once; KVCACHED_LAYOUT and KVCACHED_UNBACKED decide otherwise",
    )


def weakest(grounds: Sequence[Ground]) -> Ground:
    """What all of several ranks bear."""
    return Ground(
        "per-layer" if any(ground.layout == "per-layer" for ground in grounds) else "chunked",
        "zero" if any(ground.unbacked == "zero" for ground in grounds) else "hole",
    )

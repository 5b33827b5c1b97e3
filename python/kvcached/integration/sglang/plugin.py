"""Where SGLang lets us in: the constructor of the scheduler.

SGLang calls `register` (entry point `sglang.srt.plugins`) in the process of its front end and in that of each
scheduler. Only in the latter is a scheduler constructed, and that before its worker, its memory profile, its
pools and its prefix cache exist. SGLang logs what a plug-in raises and goes on without it, so that whoever
insists on us (`KVCACHED_STRICT`) is answered by the scheduler and not here.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from kvcached.integration import entry
from kvcached.integration.memory import EngineMemory
from kvcached.integration.patching import Seam, Versions
from kvcached.integration.rank import RankMemory

if TYPE_CHECKING:
    from kvcached.integration.patching import PatchSet

__all__ = ["engine_patches", "install", "register"]


def _scheduler_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        EngineMemory.detach(server_args)
        RankMemory.detach(server_args)
        launch = entry.start(
            "sglang", _version, lambda version: [engine_patches(version)], lambda: _check_engine(server_args)
        )
        if launch is None:
            original(self, server_args, *args, **kwargs)
            return
        rank = RankMemory(launch)
        rank.attach(server_args)
        memory = EngineMemory(launch, rank)
        memory.attach(server_args)
        original(self, server_args, *args, **kwargs)
        weakref.finalize(self, memory.close).atexit = False

    return __init__


@functools.cache
def engine_patches(version: str) -> PatchSet:
    """The seams of this process's schedulers: one set, applied once."""
    from kvcached.integration.sglang import seams  # imports SGLang

    return seams.patch_set(version)


def _check_engine(server_args: Any) -> None:
    from kvcached.integration.sglang import refusals

    refusals.check_engine(server_args)


def _version() -> str:
    from sglang.version import __version__

    return str(__version__)


_ENTRY = entry.Entry(
    "sglang",
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.__init__",
        _scheduler_init,
        ("self", "server_args", ...),
        Versions("0", "1000"),
        "constructed only where an engine runs, before anything that we change",
    ),
    _version,
)
register = _ENTRY.register
install = _ENTRY.install

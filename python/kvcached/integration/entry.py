"""How an engine lets us in: one seam that is put in place when the engine is imported, and the start of everything
else, where an engine starts.

Plug-in hooks run in every process of an engine, front ends among them. Only where an engine runs is the
object constructed that the one seam is about, and that before anything that we change exists: there the
whole set is verified and put in place, or nothing is. Settings are read at that moment too, so that each
engine of a process has those of its own start.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import wrapt

from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError
from kvcached.integration.launch import Launch
from kvcached.integration.patching import PatchSet
from kvcached.integration.refusal import decline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.integration.patching import Seam

__all__ = ["Entry", "put_in_place", "start", "wanted"]

logger = logging.getLogger("kvcached")


class Entry:
    """The one seam of an engine that does not wait for an engine to start.

    Args:
        engine: "vllm", "sglang".
        seam: on the constructor of whatever exists only where an engine runs.
        version: of the engine that is installed.
    """

    def __init__(self, engine: str, seam: Seam, version: Callable[[], str]) -> None:
        self.version = version
        self.patches = PatchSet(engine, [seam])
        self._module, self._class = seam.module, seam.path[0]

    def register(self) -> None:
        """`install`, if this environment asks for it. Called any number of times."""
        if wanted():
            self.install()

    def install(self) -> None:
        """Put the seam in place as soon as its module is imported; now, if it already is."""
        wrapt.register_post_import_hook(self._put, self._module)

    def _put(self, module: Any) -> None:
        try:
            self.patches.verify(self.version())
            self.patches.apply()
        except KVCachedConfigError as error:
            try:
                decline(error)
            except KVCachedConfigError as refusal:
                self._forbid(module, refusal)

    def _forbid(self, module: Any, refusal: KVCachedConfigError) -> None:
        """No engine may be constructed: said there, since engines swallow what their plug-ins raise."""
        constructed = getattr(module, self._class, None)
        if constructed is None:
            raise refusal

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            raise refusal

        constructed.__init__ = __init__


def start(
    engine: str,
    version: Callable[[], str],
    patches: Callable[[str], Sequence[PatchSet]],
    check: Callable[[], None],
) -> Launch | None:
    """Everything in place for an engine that is about to start, or None and nothing changed.

    Args:
        engine: "vllm", "sglang".
        version: of the engine that is installed.
        patches: the seams for a version, the same sets for every engine of this process.
        check: raises where the engine's configuration names what we do not carry.

    Raises:
        KVCachedConfigError: what stands in the way, where the user asked for kvcached or nothing.
    """
    try:
        settings = Settings.from_env()
        if not settings.enabled:
            return None
        launch = Launch(settings, engine, version())
        put_in_place(launch, patches, check)
    except Exception as error:  # an engine must not die of us, whatever it is
        decline(error)
        return None
    return launch


def put_in_place(
    launch: Launch, patches: Callable[[str], Sequence[PatchSet]], check: Callable[[], None] = lambda: None
) -> None:
    """All seams that this process needs for an engine, or none. Idempotent.

    Args:
        launch: of the engine.
        patches: the sets for its version.
        check: what else must hold; asked before anything is changed.

    Raises:
        KVCachedError: what stands in the way.
    """
    _log_from(launch.settings.log_level)
    sets = patches(launch.version)
    for seams in sets:
        seams.verify(launch.version)
    check()
    applied = []
    try:
        for seams in sets:
            if not seams.applied:
                seams.apply()
                applied.append(seams)
    except BaseException:
        for seams in applied:
            seams.restore()
        raise


def wanted() -> bool:
    """Whether this environment asks for kvcached in the engines that it starts."""
    try:
        settings = Settings.from_env()
    except KVCachedConfigError:
        # Said where an engine starts, once, and not in every process.
        return os.environ.get("ENABLE_KVCACHED", "").lower() not in ("", "0", "false", "no", "off")
    return settings.enabled and settings.autopatch


def _log_from(level: str) -> None:
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s [kvcached] %(message)s", "%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)

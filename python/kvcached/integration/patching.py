"""What a seam is, and how a set of them is verified and applied: whole or not at all.

An engine is changed only where it was declared to be changed. A `Seam` names one function or method of the
engine, says which versions and which parameters it was written for and why it is replaced; a `PatchSet`
verifies all of its seams before it touches the first one. Knows no engine.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import EllipsisType

__all__ = ["PatchSet", "Seam", "SeamError", "Versions", "supported"]

logger = logging.getLogger("kvcached")

_MARK = "__kvcached_seam__"


class SeamError(KVCachedConfigError):
    """A seam does not look as declared, or was not declared for this version. Nothing was changed."""


@dataclass(frozen=True)
class Versions:
    """`at_least <= version < below`, by release number: "0.29.0+cpu" and "0.29.1rc1" are in [0.29, 0.30)."""

    at_least: str
    below: str

    def __contains__(self, version: str) -> bool:
        return _release(self.at_least) <= _release(version) < _release(self.below)

    def __str__(self) -> str:
        return f">={self.at_least},<{self.below}"


def supported(engine: str, version: str, ranges: Sequence[Versions]) -> Versions:
    """The range of versions that this one is in.

    Raises:
        SeamError: a version that we do not carry.
    """
    for versions in ranges:
        if version in versions:
            return versions
    carried = " or ".join(str(versions) for versions in ranges)
    raise SeamError(f"{engine} {version} is not supported: use {carried}, or unset ENABLE_KVCACHED")


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if numbers is None:
        return ()  # below everything: a development build without a release number is never supported
    return tuple(int(part) for part in numbers.group(1).split("."))


@dataclass(frozen=True)
class Seam:
    """One function of the engine that we replace, or that our replacements call and rely on.

    Args:
        target: "module:Qualified.name" of a function, or of a method that its class itself defines.
        make: given the original, returns the replacement. None: verified, and left as it is.
        parameters: names of the original's parameters, in order; `...` at the end: and any others.
        versions: engine versions that the replacement was written for.
        why: shown when the set is described.
        also_rebind: replace it as well in every module that imported it by name.
    """

    target: str
    make: Callable[[Any], Any] | None
    parameters: tuple[str | EllipsisType, ...]
    versions: Versions
    why: str
    also_rebind: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def path(self) -> list[str]:
        return self.target.partition(":")[2].split(".")

    def fits(self, found: tuple[str, ...]) -> bool:
        """Whether a function with these parameters is the one that was declared."""
        if self.parameters[-1:] == (...,):
            declared = self.parameters[:-1]
            return found[: len(declared)] == declared
        return found == self.parameters


@dataclass(frozen=True)
class _Place:
    """A name that holds an original: an attribute of a module or of a class."""

    owner: Any
    name: str

    def get(self) -> Any:
        return vars(self.owner).get(self.name)

    def set(self, value: Any) -> None:
        setattr(self.owner, self.name, value)


_Change = tuple[_Place, Any, Any]
"""Where, the original, its replacement."""


class PatchSet:
    """Seams of one engine that are verified and applied together."""

    def __init__(self, engine: str, seams: Sequence[Seam]) -> None:
        self.engine = engine
        self.seams = tuple(seams)
        self._done: list[_Change] = []

    @property
    def applied(self) -> bool:
        return bool(self._done)

    def verify(self, version: str) -> None:
        """Check every seam against the engine that is installed.

        Imports the modules that the seams name.

        Raises:
            SeamError: naming the seam, the version and what was found instead.
        """
        if self.applied:
            return
        for _, error in self.examined(version):
            if error is not None:
                raise error

    def examined(self, version: str) -> Iterator[tuple[Seam, SeamError | None]]:
        """Each seam of a set that is not applied, with what speaks against it in the engine that is installed. Imports its module."""
        for seam in self.seams:
            error = None
            if version not in seam.versions:
                error = SeamError(
                    f"{self.engine} {version}: seam {seam.target} was written for {seam.versions}; "
                    f"use such a version, or unset ENABLE_KVCACHED"
                )
            else:
                try:
                    self._original(seam)
                except SeamError as found:
                    error = SeamError(f"{self.engine} {version}: {found}")
                    error.__cause__ = found.__cause__
            yield seam, error

    def apply(self) -> None:
        """Replace every target, or none: a failure puts back what was replaced. Idempotent.

        Raises:
            SeamError: what went wrong; everything is as before.
        """
        if self.applied:
            return
        done: list[_Change] = []
        captured: dict[int, tuple[Any, Any]] = {}
        try:
            for seam in self.seams:
                if seam.make is None:
                    continue
                place, original = self._original(seam)
                replacement = seam.make(original)
                setattr(replacement, _MARK, seam.target)
                place.set(replacement)
                done.append((place, original, replacement))
                if seam.also_rebind:
                    captured[id(original)] = (original, replacement)
            for place, original, replacement in _captures(captured):
                place.set(replacement)
                done.append((place, original, replacement))
        except BaseException as error:
            _undo(done)
            if isinstance(error, Exception) and not isinstance(error, SeamError):
                raise SeamError(f"{self.engine}: the seams could not be applied: {error!r}") from error
            raise
        self._done = done

    def restore(self) -> None:
        """Put the originals back. For tests: an engine that was built meanwhile keeps what it captured."""
        done, self._done = self._done, []
        _undo(done)

    def describe(self) -> str:
        """One line a seam: its target, its versions, why, and whether it is applied."""
        state = "applied" if self.applied else "not applied"
        lines = [
            f"  {seam.target} ({seam.versions}): {seam.why if seam.make else f'relied on: {seam.why}'}"
            for seam in self.seams
        ]
        return "\n".join([f"{self.engine}: {len(self.seams)} seams, {state}", *lines])

    def _original(self, seam: Seam) -> tuple[_Place, Any]:
        try:
            owner: Any = importlib.import_module(seam.module)
        except Exception as error:
            raise SeamError(f"seam {seam.target}: {seam.module} cannot be imported: {error}") from error
        *classes, name = seam.path
        for part in classes:
            owner = vars(owner).get(part)
            if owner is None:
                raise SeamError(f"seam {seam.target}: there is no {part}")
        original = vars(owner).get(name)
        if original is None:
            raise SeamError(f"seam {seam.target}: there is no {name} of its own")
        if not inspect.isfunction(original):
            raise SeamError(f"seam {seam.target}: expected a function, found {type(original).__name__}")
        if hasattr(original, _MARK):
            raise SeamError(f"seam {seam.target}: already replaced by another patch set")
        found = tuple(inspect.signature(original).parameters)
        if not seam.fits(found):
            declared = ", ".join("..." if name is ... else name for name in seam.parameters)
            raise SeamError(
                f"seam {seam.target}: expected parameters ({declared}), found ({', '.join(found)})"
            )
        return _Place(owner, name), original


def _captures(captured: dict[int, tuple[Any, Any]]) -> Iterator[_Change]:
    """Every module global that holds one of these originals, by one walk over all modules."""
    if not captured:
        return
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            original, replacement = captured.get(id(value), (None, None))
            if original is not None and value is original:
                yield _Place(module, name), original, replacement


def _undo(done: list[_Change]) -> None:
    for place, original, replacement in reversed(done):
        if place.get() is replacement:
            place.set(original)
        else:
            logger.warning(
                "%s.%s was replaced again by others; left as it is", place.owner.__name__, place.name
            )

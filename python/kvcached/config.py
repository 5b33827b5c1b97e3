"""Settings from the environment: each declared once, in `Settings`, with unit, default and what is accepted.

docs/SETTINGS.md shows the same table (`settings_table`). What cannot be used is a `KVCachedConfigError`,
never a silent default: a malformed value, limits that contradict, an unknown variable of our prefix.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from kvcached.errors import KVCachedConfigError, TermsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Setting", "Settings", "declared_settings", "settings_table"]

T = TypeVar("T")

PREFIX = "KVCACHED_"
MIB = 1 << 20
#: 1 PiB: more than any machine has, and in bytes still far from the end of 64 bits.
MAX_MB = 1 << 30
SHOWN_CHARS = 60
#: Less than this a loaded machine needs to answer at all; more than an hour nobody waits.
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 3600
DAY_S = 86400
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: Settings that say how much memory an engine may have. What is wrong with them is a `TermsError`.
TERMS = ("KVCACHED_MIN", "KVCACHED_LIMIT", "KVCACHED_DEVICE_BUDGET")
#: `limit` where there is none.
UNLIMITED = (1 << 64) - 1
#: What a stranger needs to start at all: a CUDA context and the first weights. Ours then give more as it asks.
GPU_WATERMARK_BYTES = 1 << 30


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a value may be. `parse` returns None for a text that is none of it."""

    accepts: str
    parse: Callable[[str], T | None]


@dataclass(frozen=True)
class Setting:
    """One environment variable, declared."""

    variable: str
    kind: Kind[Any]
    default: str  # as people read it
    unit: str  # "" where there is none
    meaning: str


def _choice(values: Mapping[str, T]) -> Kind[T]:
    return Kind(", ".join(values), lambda text: values.get(text.lower()))


def _count_from(least: int) -> Kind[int]:
    def parse(text: str) -> int | None:
        # int() takes more than people mean ("1_0", " 1", other digits), and very long numbers make it fail.
        if not re.fullmatch(r"[0-9]{1,10}", text):
            return None
        number = int(text)
        return number if least <= number <= MAX_MB else None

    return Kind(f"a whole number from {least} to {MAX_MB}", parse)


def _seconds(least: float, most: int) -> Kind[float]:
    def parse(text: str) -> float | None:
        # float() takes more than people mean ("1_0", "nan", "1e3").
        if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,6})?", text):
            return None
        seconds = float(text)
        return seconds if least <= seconds <= most else None

    return Kind(f"seconds from {least} to {most}", parse)


def _size(words: Mapping[str, int] | None = None) -> Kind[int]:
    """Bytes. `MB` and `GB` are refused: half of those who write them mean powers of ten."""
    words = words or {}

    def parse(text: str) -> int | None:
        if text.lower() in words:
            return words[text.lower()]
        size = re.fullmatch(
            r"(?P<whole>[0-9]{1,16})((\.(?P<part>[0-9]{1,6}))?(?P<unit>[KMGT])(iB)?)?", text, re.IGNORECASE
        )
        if size is None or not text.isascii():
            return None
        part = size["part"] or ""
        unit = UNITS[size["unit"].upper()] if size["unit"] else 1
        nbytes = int(size["whole"] + part) * unit // 10 ** len(part)
        return nbytes if nbytes <= MAX_MB * MIB else None

    accepts = "a size up to 1024T: bytes, or with a binary unit (`512M`, `1.5GiB`)"
    return Kind(", ".join([*words, accepts]), parse)


def _matching(pattern: str, accepts: str) -> Kind[str]:
    return Kind(accepts, lambda text: text if re.fullmatch(pattern, text) else None)


BOOLEAN = _choice(
    {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
)
# The rule of crates/control, here too: a bad name is refused before an engine has loaded its weights.
NAME = _matching(
    r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", "1 to 64 characters of A-Z a-z 0-9 . _ -, the first not a dot"
)
PAGE_ORDER = _choice({order: order for order in ("lowest", "highest")})
LAYOUT = _choice({layout: layout for layout in ("auto", "chunked", "per-layer")})
UNBACKED = _choice({policy: policy for policy in ("auto", "hole", "zero")})
PROGRAM = _matching(r".+", "a program's name in PATH, or its path")
LOG_LEVEL = _choice({level: level for level in ("debug", "info", "warning", "error")})


def _declare(
    variable: str,
    kind: Kind[T],
    *,
    default: Any,
    meaning: str,
    unit: str = "",
    default_shown: str | None = None,
) -> Any:
    shown = default_shown if default_shown is not None else str(default).lower()
    return field(default=default, metadata={"setting": Setting(variable, kind, shown, unit, meaning)})


class PoolOptions(TypedDict):
    """See `Settings.pool_options`."""

    min_reserved_bytes: int
    max_reserved_bytes: int
    highest_pages_first: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a process. `*_mb` in MiB as people set them; `*_bytes` give bytes, whether fields, properties or methods."""

    enabled: bool = _declare(
        "ENABLE_KVCACHED",
        BOOLEAN,
        default=False,
        meaning="Make the KV cache of engines in this process elastic.",
    )
    autopatch: bool = _declare(
        "KVCACHED_AUTOPATCH",
        BOOLEAN,
        default=True,
        meaning="Patch an engine when it is imported; off, nothing happens until the integration is called.",
    )
    strict: bool = _declare(
        "KVCACHED_STRICT",
        BOOLEAN,
        default=False,
        meaning="Where kvcached cannot be used, refuse to start instead of running natively.",
    )
    ipc_name: str | None = _declare(
        "KVCACHED_IPC_NAME",
        NAME,
        default=None,
        default_shown="engine and process id",
        meaning="Name of this instance, as `kvctl` shows it. One live instance a name.",
    )
    page_mb: int | None = _declare(
        "KVCACHED_PAGE_MB",
        _count_from(1),
        default=None,
        default_shown="chosen for the model",
        unit="MiB",
        meaning="Size of a page to aim at: the unit in which memory is taken and given back.",
    )
    min_reserved_mb: int = _declare(
        "KVCACHED_MIN_RESERVED_MB",
        _count_from(0),
        default=0,
        unit="MiB",
        meaning="Memory of a pool that is mapped ahead at all times, without blocks in it.",
    )
    max_reserved_mb: int = _declare(
        "KVCACHED_MAX_RESERVED_MB",
        _count_from(0),
        default=48,
        unit="MiB",
        meaning="Memory of a pool that may stay mapped without blocks in it; what is above goes back in the background, and all but "
        "the minimum after a second in which no page was taken or emptied. Up to half of it is mapped ahead while a load grows. At "
        "least `KVCACHED_MIN_RESERVED_MB`.",
    )
    handle_cache_mb: int = _declare(
        "KVCACHED_HANDLE_CACHE_MB",
        _count_from(0),
        default=0,
        unit="MiB",
        meaning="Memory of released pages that a group of tensors keeps, cleared and unmapped, for the next ones.",
    )
    layout: str = _declare(
        "KVCACHED_LAYOUT",
        LAYOUT,
        default="auto",
        meaning="How pages lie: `chunked` (one piece of memory a page, sparse block ids) or `per-layer` (one a "
        "buffer, dense ids: slower to map, larger pages). `auto`: chunked, but per-layer for an attention backend "
        "that was not shown to reach the highest ids (docs/KERNELS.md).",
    )
    unbacked: str = _declare(
        "KVCACHED_UNBACKED",
        UNBACKED,
        default="auto",
        meaning="What lies where no memory is: `hole`, nothing, touching it is an error of the device; or `zero`, "
        "zeros that may be read. `auto`: hole for an attention backend that was shown to leave holes alone "
        "(docs/KERNELS.md), else zero.",
    )
    min_bytes: int = _declare(
        "KVCACHED_MIN",
        _size(),
        default=0,
        unit="bytes",
        meaning="Memory of each device that is guaranteed to this instance, used or not: no other may have it.",
    )
    limit: int = _declare(
        "KVCACHED_LIMIT",
        _size({"none": UNLIMITED}),
        default=UNLIMITED,
        default_shown="none",
        unit="bytes",
        meaning="The most memory of each device that this instance may have. At least `KVCACHED_MIN`.",
    )
    device_budget_bytes: int | None = _declare(
        "KVCACHED_DEVICE_BUDGET",
        _size(),
        default=None,
        default_shown="the whole device; half the RAM on the host backend",
        unit="bytes",
        meaning="Memory of a device that all instances of this user share. The first instance on a device sets it; one that states "
        "another while that one lives does not start.",
    )
    cache_idle_s: float = _declare(
        "KVCACHED_CACHE_IDLE_S",
        _seconds(0, DAY_S),
        default=60.0,
        default_shown="60",
        unit="s",
        meaning="After so long without a request the memory of cached prefixes goes back. 0: never.",
    )
    free_watermark: int | None = _declare(
        "KVCACHED_FREE_WATERMARK",
        _size(),
        default=None,
        default_shown="1GiB on a GPU, 0 on the host backend",
        unit="bytes",
        meaning="When less of the device's memory is free, whoever uses it, cached prefixes go back until it is. 0: never.",
    )
    max_cached_tokens: int | None = _declare(
        "KVCACHED_MAX_CACHED_TOKENS",
        _count_from(0),
        default=None,
        default_shown="no cap",
        unit="tokens",
        meaning="Tokens of cached prefixes that no request uses and that an engine keeps at the end of a step; what is above goes, the "
        "oldest first, in whole pages. A cap costs prefix-cache hits; memory that others want goes back without one too.",
    )
    page_order: str = _declare(
        "KVCACHED_PAGE_ORDER",
        PAGE_ORDER,
        default="lowest",
        meaning="Which free pages are handed out first. `highest` is a test switch: it proves that kernels "
        "can address the end of the cache.",
    )
    ipc_timeout_s: float = _declare(
        "KVCACHED_IPC_TIMEOUT",
        _seconds(MIN_TIMEOUT_S, MAX_TIMEOUT_S),
        default=10.0,
        default_shown="10",
        unit="s",
        meaning="A rank of an engine of several that is silent for so long counts as lost, which ends the engine; after half of it, "
        "it is asked again. One whose process ends is noticed at once.",
    )
    log_level: str = _declare(
        "KVCACHED_LOG_LEVEL", LOG_LEVEL, default="info", meaning="Least severity of kvcached's own log lines."
    )

    python: str = _declare(
        "KVCACHED_PYTHON",
        PROGRAM,
        default="python3",
        default_shown="that of `kvctl`'s wheel, else python3",
        meaning="The engines' Python, with which `kvctl doctor` looks at them. Engines do not read it.",
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """The settings that `env` states; what it does not state has its default.

        Raises:
            KVCachedConfigError: a malformed value, a maximum, limit or budget below its minimum (`TermsError` where it is a limit, a
                minimum or a budget), or an unknown variable that begins with `KVCACHED_`.
        """
        declared = dict(_declared())
        known = {setting.variable for setting in declared.values()}
        for variable in sorted(env):
            if variable.startswith(PREFIX) and variable not in known:
                raise KVCachedConfigError(
                    f"{_shown(variable)} is not a setting of kvcached; the nearest is "
                    f"{_nearest(variable, known)}. Rename or unset it"
                )
        stated: dict[str, Any] = {
            name: _parse(setting, env[setting.variable])
            for name, setting in declared.items()
            if setting.variable in env
        }
        settings = cls(**stated)
        if settings.max_reserved_mb < settings.min_reserved_mb:
            raise KVCachedConfigError(
                f"KVCACHED_MAX_RESERVED_MB ({settings.max_reserved_mb} MiB) is below "
                f"KVCACHED_MIN_RESERVED_MB ({settings.min_reserved_mb} MiB): raise the one or lower the other"
            )
        for most, variable in (
            (settings.limit, "KVCACHED_LIMIT"),
            (settings.device_budget_bytes, "KVCACHED_DEVICE_BUDGET"),
        ):
            if most is not None and most < settings.min_bytes:
                raise TermsError(
                    f"{variable} ({most} bytes) is below KVCACHED_MIN ({settings.min_bytes} bytes): "
                    "raise the one or lower the other"
                )
        return settings

    @property
    def page_bytes(self) -> int | None:
        """Size of a page to aim at, bytes; None: the geometry solver chooses."""
        return None if self.page_mb is None else self.page_mb * MIB

    @property
    def min_reserved_bytes(self) -> int:
        """Bytes of a pool that are always kept ready."""
        return self.min_reserved_mb * MIB

    @property
    def max_reserved_bytes(self) -> int:
        """Bytes of a pool that may stay ready."""
        return self.max_reserved_mb * MIB

    @property
    def handle_cache_bytes(self) -> int:
        """Bytes of released pages that are kept for the next ones."""
        return self.handle_cache_mb * MIB

    @property
    def limit_bytes(self) -> int | None:
        """The most bytes of each device that this instance may have; None: no limit."""
        return None if self.limit == UNLIMITED else self.limit

    def free_watermark_bytes(self, device: str) -> int:
        """Bytes of `device` ("cuda:N", "hip:N" or "cpu") that are to be free; 0: none."""
        if self.free_watermark is not None:
            return self.free_watermark
        # On the host the kernel's page cache takes what is free: a low number says nothing there.
        return 0 if device == "cpu" else GPU_WATERMARK_BYTES

    def check_start(self, page_bytes: int) -> None:
        """An engine needs a page for its null block before it can do anything, and what is to be mapped ahead at all times.

        Raises:
            TermsError: it may not have that much.
        """
        needed = page_bytes * (1 + -(-self.min_reserved_bytes // page_bytes))
        reserve = " and KVCACHED_MIN_RESERVED_MB" if self.min_reserved_mb else ""
        for most, variable in (
            (self.limit_bytes, "KVCACHED_LIMIT"),
            (self.device_budget_bytes, "KVCACHED_DEVICE_BUDGET"),
        ):
            if most is not None and most < needed:
                raise TermsError(
                    f"{variable} ({most} bytes) is below what an engine needs to start, {needed} bytes: a page of {page_bytes} "
                    f"bytes{reserve}. Raise it, or set KVCACHED_PAGE_MB to smaller pages"
                )

    @property
    def pool_options(self) -> PoolOptions:
        """What these settings ask of every pool, as keyword arguments of `kvcached._core.Pool`."""
        return {
            "min_reserved_bytes": self.min_reserved_bytes,
            "max_reserved_bytes": self.max_reserved_bytes,
            "highest_pages_first": self.page_order == "highest",
        }


def declared_settings() -> tuple[Setting, ...]:
    """All settings, in the order of the table."""
    return tuple(setting for _, setting in _declared())


def settings_table() -> str:
    """The table of docs/SETTINGS.md, Markdown."""
    rows = ["| variable | default | unit | accepted | meaning |", "|---|---|---|---|---|"]
    rows += [
        f"| `{s.variable}` | {s.default} | {s.unit or '-'} | {s.kind.accepts} | {s.meaning} |"
        for s in declared_settings()
    ]
    return "\n".join(rows) + "\n"


def _declared() -> Iterator[tuple[str, Setting]]:
    """Field of `Settings` and its declaration."""
    return ((f.name, f.metadata["setting"]) for f in fields(Settings))


def _parse(setting: Setting, text: str) -> object:
    value: object = setting.kind.parse(text)
    if value is None:
        unit = f" (unit: {setting.unit})" if setting.unit else ""
        kind = TermsError if setting.variable in TERMS else KVCachedConfigError
        raise kind(
            f"{setting.variable}={_shown(text)} is not accepted: give {setting.kind.accepts}{unit}, "
            f"or unset it for the default ({setting.default})"
        )
    return value


def _shown(text: str) -> str:
    """`text` fit for a message: escaped, and not longer than a message should be."""
    return ascii(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


def _nearest(variable: str, known: set[str]) -> str:
    """By what is left without our name: in `KVCACHED_ENABLE` the word that counts is `ENABLE`."""
    word = _distinct(variable)
    return max(sorted(known), key=lambda name: SequenceMatcher(None, word, _distinct(name)).ratio())


def _distinct(variable: str) -> str:
    return variable.removeprefix(PREFIX).removesuffix("_KVCACHED")[:SHOWN_CHARS].upper()

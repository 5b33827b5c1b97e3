"""The installation, the settings, the devices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import site
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached import _core
from kvcached.config import Settings, declared_settings
from kvcached.doctor.finding import Finding
from kvcached.errors import KVCachedConfigError, KVCachedError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["devices", "installation", "settings"]

HOOKS = "kvcached_hooks.pth"
ENTRY_GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")
GIB = 1 << 30


def installation() -> Iterator[Finding]:
    """What is installed, and whether engines will find it."""
    yield Finding(
        "ok",
        "kvcached",
        f"{_core.__version__}, Python {platform.python_version()}, {platform.machine()}, {Path(__file__).parent.parent}",
    )
    groups = [
        group
        for group in ENTRY_GROUPS
        if any(point.name == "kvcached" for point in importlib.metadata.entry_points(group=group))
    ]
    missing = sorted(set(ENTRY_GROUPS) - set(groups))
    if missing:
        yield Finding(
            "problem",
            "plug-ins",
            f"no entry point kvcached in {', '.join(missing)}: engines do not find it",
            "install the wheel with pip into the environment that runs the engine",
        )
    else:
        yield Finding("ok", "plug-ins", f"entry points in {', '.join(groups)}")
    folders = {sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()}
    hooks = sorted(str(Path(folder) / HOOKS) for folder in folders if (Path(folder) / HOOKS).exists())
    if hooks:
        yield Finding("ok", "hook file", hooks[0])
    else:
        yield Finding(
            "note",
            "hook file",
            f"no {HOOKS} in a site folder: engines that load no plug-ins (VLLM_PLUGINS, Ray's actors) are not reached",
            "where you need those, install the wheel with pip, or call install() of kvcached.integration.vllm",
        )


def settings() -> Iterator[Finding]:
    """Whether it is switched on, and what is set beside that."""
    try:
        read = Settings.from_env()
    except KVCachedConfigError as error:
        yield Finding("problem", "settings", str(error), "docs/SETTINGS.md has them all")
        return
    if not read.enabled:
        yield Finding(
            "problem", "switch", "ENABLE_KVCACHED is off: engines run natively", "set ENABLE_KVCACHED=true"
        )
    elif not read.autopatch:
        yield Finding(
            "note",
            "switch",
            "on, but KVCACHED_AUTOPATCH=false: nothing happens by itself",
            "call install() of kvcached.integration.vllm or .sglang before an engine is constructed",
        )
    else:
        yield Finding("ok", "switch", "ENABLE_KVCACHED is on")
    stated = [
        f"{each.variable}={os.environ[each.variable]}"
        for each in declared_settings()
        if each.variable in os.environ and each.variable != "ENABLE_KVCACHED"
    ]
    yield Finding("ok", "settings", ", ".join(stated) or "all as by default")


def devices() -> Iterator[Finding]:
    """Whether memory can be mapped: the GPUs that this process sees, and this machine's own memory."""
    found = False
    for backend in ("cuda", "hip"):
        why = _core.backend_available(backend)
        if why is not None:
            yield Finding("note", backend, f"not usable: {why}")
            continue
        for number in range(64):
            device = f"{backend}:{number}"
            try:
                yield Finding("ok", device, described(device))
            except KVCachedError as error:
                if number == 0:
                    yield Finding(
                        "problem",
                        device,
                        str(error),
                        "look at nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES",
                    )
                break
            found = True
    if not found:
        yield Finding("note", "GPU", "none: engines for CPUs use this machine's memory")
    yield Finding("ok", "cpu", described("cpu"))


def described(device: str) -> str:
    """Which hardware, its memory, and the smallest piece that it gives."""
    free, total = _core.mem_info(device)
    return (
        f"{_core.identity(device)}: {free / GIB:.1f} of {total / GIB:.1f} GiB free, pieces of "
        f"{_core.granularity(device) >> 10} KiB"
    )

"""The engines: which versions are installed, and whether each place that we change is as we know it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from kvcached import kernel_records
from kvcached.doctor.finding import Finding
from kvcached.errors import KVCachedConfigError
from kvcached.integration.patching import supported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.integration.patching import PatchSet

__all__ = ["ENGINES", "engine"]

ENGINES = ("vllm", "sglang")


def engine(name: str, *, asked: bool) -> Iterator[Finding]:
    """Everything about one engine. Imports it, which takes seconds.

    Args:
        name: of `ENGINES`. asked: its absence is a problem, and every seam is listed.
    """
    version = installed(name)
    if version is None:
        if asked:
            yield Finding("problem", name, "not installed here", "run this in the environment that runs it")
        else:
            yield Finding("note", name, "not installed here")
        return
    try:
        sets = patch_sets(name, version)
    except KVCachedConfigError as error:
        yield Finding("problem", f"{name} {version}", str(error))
        return
    except Exception as error:  # an engine that cannot be imported
        yield Finding(
            "problem", f"{name} {version}", f"cannot be imported: {error!r}", "repair its installation"
        )
        return
    good, problems = 0, 0
    for seams in sets:
        for seam, wrong in seams.examined(version):
            if wrong is not None:
                problems += 1
                yield Finding("problem", f"{name} seam", str(wrong), f"use {seam.versions} as released")
            else:
                good += 1
                if asked:
                    what = "" if seam.make else "relied on: "
                    yield Finding("ok", f"{name} seam", f"{seam.target}: {what}{seam.why}")
    if not problems:
        yield Finding("ok", f"{name} {version}", f"supported, {good} of {good} seams as known")
    yield from kernels(name, version)


def kernels(name: str, version: str) -> Iterator[Finding]:
    """Attention backends of which something is known."""
    known = sorted({r.backend for r in kernel_records.records() if (r.engine, r.version) == (name, version)})
    if known:
        yield Finding("ok", f"{name} attention", f"shown hole-safe or not: {', '.join(known)}")
    else:
        yield Finding(
            "note",
            f"{name} attention",
            f"nothing is known of the backends of {version}: dense ids over zeros, which costs memory",
            f"python -m kvcached.verify_kernels --engine {name}",
        )


def installed(name: str) -> str | None:
    """Its version, None where it is not there. Imports its package, not the engine."""
    if importlib.util.find_spec(name) is None:
        return None
    return str(importlib.import_module(f"{name}.version").__version__)


def patch_sets(name: str, version: str) -> list[PatchSet]:
    """Our seams for this version, not applied."""
    if name == "vllm":
        from kvcached.integration.vllm import seams as vllm

        supported("vllm", version, vllm.SUPPORTED)  # before it is imported
        from vllm.platforms import current_platform

        device_type = "cuda" if current_platform.is_cuda() else "cpu"
        return [
            vllm.scheduler_set(version),
            vllm.worker_set(version, device_type),
            vllm.front_end_set(version),
        ]
    from kvcached.integration.sglang import seams as sglang

    supported("sglang", version, sglang.SUPPORTED)
    return [sglang.patch_set(version)]

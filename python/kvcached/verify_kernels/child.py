"""One backend in a process of its own: a row without memory that is touched ends the process.

    python -m kvcached.verify_kernels.child ENGINE BACKEND DEVICE REPORT full|quick PHASE...

Appends one JSON object a line to the file REPORT (see `outcome.py`); what engines print goes where it goes.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvcached.kernel_records import device_name, machine_of
from kvcached.verify_kernels.subject import UntestedError

if TYPE_CHECKING:
    from kvcached.verify_kernels.subject import Subject

__all__ = ["ENGINES", "FAULTS"]

#: Of each engine the module and the class that know it.
ENGINES = {
    "vllm": ("kvcached.verify_kernels.vllm", "Vllm"),
    "sglang": ("kvcached.verify_kernels.sglang", "Sglang"),
    "control": ("kvcached.verify_kernels.control", "Control"),
}

#: What the CUDA driver says of a kernel that went where it may not.
FAULTS = (
    "illegal memory access",
    "illegal address",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
)


def main(arguments: list[str]) -> int:
    """Run the phases one after another; returns 0 when they ran, whatever they found, and 1 after an error of the engine or the GPU."""
    engine, backend, device, path, extent, *phases = arguments
    faulthandler.enable()
    with Path(path).open("a", buffering=1) as file:

        def report(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")  # whole lines: the next one may be a fault

        try:
            _start(device)
            subject = _subject(engine, backend, device)
            from kvcached.verify_kernels.proof import prove

            names = {"device_name": device_name(device), "machine": machine_of(device)}
            report(backend=subject.backend, version=subject.version, **names)
            for phase in phases:
                report(phase=phase)
                prove(subject, device, phase, extent == "quick", report)
            for note in dict.fromkeys(subject.notes):
                report(note=note)
        except UntestedError as error:
            report(untested=str(error))
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            fault = _fault(error, device)
            report(**({"fault": fault} if fault else {"untested": " ".join(text.split())[:300]}))
            return 1
    return 0


def _subject(engine: str, backend: str, device: str) -> Subject:
    module, name = ENGINES[engine]
    try:
        made: Subject = getattr(importlib.import_module(module), name)(backend, device)
    except ImportError as error:
        traceback.print_exc()
        raise UntestedError(f"not installed: {error}") from error
    return made


def _start(device: str) -> None:
    """The context of torch, which kvcached shares."""
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise UntestedError(f"torch cannot use {device}: {error}") from error


def _fault(error: Exception, device: str) -> str | None:
    """What the driver says of the kernels that were run, where it has something to say. The error may be another library's, the
    first that met a device on which a kernel had gone where it may not.
    """
    said = [str(error)]
    if device != "cpu":
        import torch

        try:
            torch.cuda.synchronize(device)
        except RuntimeError as latest:
            said.append(str(latest))
    return next((fault for fault in FAULTS if any(fault in text for text in said)), None)


def _leave(code: int) -> NoReturn:
    """Without the clean-up: a GPU context may be gone, and an engine that dies of it would be another's fault."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))

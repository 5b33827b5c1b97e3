"""What became of a backend, from what its process reported and how it ended. Pure."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CONTROLS", "HOLES", "PHASES", "TOP_IDS", "Ended", "Outcome", "PhaseOutcome", "read"]

HOLES, TOP_IDS = "holes", "top ids"
#: What is proven, in this order.
PHASES = (HOLES, TOP_IDS)

#: Of each control (`control.py`) the verdict that a working test reaches: (hole-safe, top ids). None: either, that is not its fault.
CONTROLS: dict[str, tuple[bool | None, bool | None]] = {
    "correct": (True, True),
    "reads_stale_entries": (False, None),
    "reads_one_block_more": (False, None),
    "offsets_in_32_bits": (None, False),
}

#: How a process ends that touched a hole on the host backend.
FAULT_SIGNALS = (signal.SIGSEGV, signal.SIGBUS)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus a signal's number), or None where it was stopped after `timeout_s`.

    `fault`: what the driver said of it on stderr, where it said so.
    """

    code: int | None
    timeout_s: float = 0.0
    fault: str | None = None


@dataclass
class PhaseOutcome:
    """One phase. `finished`: it came to its end. `fault`: how it died of touching what it may not, in which case."""

    finished: bool = False
    cases: int = 0
    address_bytes: int = 0
    differs: list[str] = field(default_factory=list)
    fault: str | None = None

    @property
    def passed(self) -> bool:
        return self.finished and not self.failed

    @property
    def failed(self) -> bool:
        return bool(self.differs) or self.fault is not None

    def __str__(self) -> str:
        if self.fault is not None:
            return self.fault
        if self.differs:
            more = f" and {len(self.differs) - 1} more" if len(self.differs) > 1 else ""
            return f"differs from dense tensors in {self.differs[0]}{more}"
        addresses = f" in {self.address_bytes >> 30} GiB of addresses" if self.address_bytes >> 30 else ""
        return f"{self.cases} cases{addresses}"


@dataclass
class Outcome:
    """All that a backend's processes said. `untested`: why there is no verdict."""

    backend: str | None = None
    version: str = ""
    device_name: str = ""
    machine: str = ""
    phases: dict[str, PhaseOutcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    untested: str | None = None


def read(lines: Iterable[str], ended: Ended, outcome: Outcome) -> None:
    """Add one process's report to `outcome`.

    A fault is a verdict on the phase it happened in. Any other end without a result is none: `untested` says why.
    """
    phase: PhaseOutcome | None = None
    case = "the beginning"
    for line in lines:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # the last line of a process that died while it wrote
        if "backend" in event:
            outcome.backend, outcome.version = event["backend"], event["version"]
            outcome.device_name, outcome.machine = event["device_name"], event["machine"]
        elif "phase" in event:
            phase = outcome.phases.setdefault(event["phase"], PhaseOutcome())
        elif "case" in event:
            case = event["case"]
        elif "note" in event:
            outcome.notes.append(event["note"])
        elif "untested" in event:
            outcome.untested = event["untested"] + (f" (in {case})" if phase else "")
        elif phase is not None and "differs" in event:
            phase.differs.append(event["differs"])
        elif phase is not None and "cases" in event:
            phase.finished, phase.cases, phase.address_bytes = True, event["cases"], event["address_bytes"]
            phase = None
        elif phase is not None and "fault" in event:
            phase.fault = f"{event['fault']} in {case}"
    if outcome.untested is not None or (phase is not None and phase.fault is not None):
        return
    if phase is not None and ended.code is not None and -ended.code in FAULT_SIGNALS:
        phase.fault = f"{signal.Signals(-ended.code).name} in {case}"
    elif phase is not None and ended.code not in (None, 0) and ended.fault is not None:
        phase.fault = f"{ended.fault} in {case}"
    elif ended.code is None:
        outcome.untested = f"no end after {ended.timeout_s:.0f} s (in {case})"
    elif ended.code != 0 or phase is not None:
        outcome.untested = f"its process ended with {_code(ended.code)} (in {case})"


def _code(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"

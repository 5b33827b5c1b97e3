"""Prove which attention backends of the installed engines may run over a KV cache with holes.

Runs each backend in a process of its own over sparse and dense KV cache tensors, shows what it did, and records it for
the settings KVCACHED_UNBACKED and KVCACHED_LAYOUT (docs/KERNELS.md).

exit codes: 0 every tested backend passed, 1 one did not, 2 usage or a records file that cannot be written, 3 nothing could be tested
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvcached import _core, kernel_records
from kvcached.errors import KVCachedError
from kvcached.kernel_records import KernelRecord
from kvcached.verify_kernels.child import FAULTS
from kvcached.verify_kernels.outcome import CONTROLS, PHASES, TOP_IDS, Ended, Outcome, read

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What is tested where no backend is named, by engine and kind of device.
BACKENDS = {
    "vllm": {"cuda": ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"), "cpu": ("CPU_ATTN",)},
    "sglang": {"cuda": ("triton", "torch_native"), "cpu": ("torch_native",)},
}
#: Of a process that failed, lines of its output that are shown.
SHOWN_LINES = 40

#: The engines quiet, off the network, and without us: native code is what is tested.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Verdict(NamedTuple):
    """Of one backend: its record, or why there is none."""

    engine: str
    backend: str
    record: KernelRecord | None
    untested: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parser().parse_args(arguments)
    if options.list:
        _show_records(kernel_records.records())
        return 0
    engines = _engines(options)
    if not engines:
        say("no engine is installed here: neither vllm nor sglang can be imported")
        return 3
    unusable = _unusable(options.device)
    if unusable:
        say(f"{options.device} cannot be used: {unusable}")
        return 3
    if not (options.dry_run or options.self_test):
        try:
            kernel_records.store([])  # before anything has run for minutes
        except (KVCachedError, OSError) as error:
            say(f"records cannot be kept: {error} (or use --dry-run)")
            return 2
    subjects = [
        (engine, backend)
        for engine in engines
        for backend in options.backend or _default_backends(engine, options.device)
    ]
    with ThreadPoolExecutor(options.jobs) as jobs:  # each waits for a process of its own
        running = [jobs.submit(verify, engine, backend, options) for engine, backend in subjects]
        verdicts = [verdict.result() for verdict in running]
    _show_verdicts(verdicts)
    if options.json:
        Path(options.json).write_text(
            json.dumps([_as_json(verdict) for verdict in verdicts], indent=1) + "\n"
        )
    if options.self_test:
        return _judge_controls(verdicts)
    found = [verdict.record for verdict in verdicts if verdict.record is not None]
    if found and not options.dry_run:
        _record(found)
    if not found:
        return 3
    return 0 if all(record.hole_safe and record.top_ids for record in found) else 1


def verify(engine: str, backend: str, options: argparse.Namespace) -> Verdict:
    """Run one backend to its verdict; progress on stderr."""
    start = time.monotonic()
    name = f"{engine} {backend}"
    say(f"{name}: running over holes and over the highest ids")
    outcome = Outcome()
    _run(engine, backend, PHASES, options, outcome)
    if outcome.untested is None and TOP_IDS not in outcome.phases:
        # The process died in the first phase; the second is a question of its own.
        _run(engine, backend, [TOP_IDS], options, outcome)
    verdict = judge(engine, backend, outcome)
    for phase, of_phase in outcome.phases.items():
        say(
            f"{name}: {phase}: {'passed' if of_phase.passed else 'FAILED' if of_phase.failed else 'no verdict'}, {of_phase}"
        )
    if verdict.untested is not None:
        say(f"{name}: not tested: {verdict.untested}")
    say(f"{name}: {time.monotonic() - start:.0f} s")
    return verdict


def judge(engine: str, backend: str, outcome: Outcome) -> Verdict:
    """The verdict on an outcome. A failure is one even where the other phase could not run; a pass needs both."""
    phases = [outcome.phases.get(phase) for phase in PHASES]
    failed = any(phase is not None and phase.failed for phase in phases)
    passed = all(phase is not None and phase.passed for phase in phases)
    if not (failed or passed) or outcome.backend is None:
        return Verdict(engine, outcome.backend or backend, None, outcome.untested or "no result")
    told = [
        f"{name}: {phase if phase is not None and (phase.passed or phase.failed) else 'not shown'}"
        for name, phase in zip(PHASES, phases, strict=True)
    ]
    record = KernelRecord(
        engine=engine,
        version=outcome.version,
        backend=outcome.backend,
        device=outcome.device_name,
        hole_safe=phases[0] is not None and phases[0].passed,
        top_ids=phases[1] is not None and phases[1].passed,
        cases=sum(phase.cases for phase in phases if phase is not None),
        detail="; ".join(told + outcome.notes),
        when=datetime.datetime.now(datetime.timezone.utc).date(),
        machine=outcome.machine,
    )
    return Verdict(engine, outcome.backend, record, None)


def _run(
    engine: str, backend: str, phases: Sequence[str], options: argparse.Namespace, outcome: Outcome
) -> None:
    """One process; what it reported goes into `outcome`, the end of its output to stderr where it failed."""
    with tempfile.TemporaryDirectory(prefix="kvcached-verify-") as folder:
        report, output = Path(folder) / "report", Path(folder) / "output"
        report.touch()
        extent = "quick" if options.quick else "full"
        command = [sys.executable, "-m", "kvcached.verify_kernels.child"]
        command += [engine, backend, _device_in_child(options.device), str(report), extent, *phases]
        with output.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env=_environment(options.device))
            try:
                code: int | None = process.wait(timeout=options.timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                process.kill()
                process.wait()
        said = output.read_text(errors="replace")
        fault = next((fault for fault in FAULTS if fault in said), None)
        read(report.read_text().splitlines(), Ended(code, options.timeout, fault), outcome)
    lines = said.splitlines()[-SHOWN_LINES:]
    if code != 0 and lines:
        say(
            "\n".join(
                [f"{engine} {backend}: the end of what its process said:", *(f"    {line}" for line in lines)]
            )
        )


def _environment(device: str) -> dict[str, str]:
    """Of a child: the one GPU it is for, and none of our hooks."""
    environ = {key: value for key, value in os.environ.items() if key != "ENABLE_KVCACHED"}
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)
    if device == "cpu":
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        environ.setdefault("TRITON_INTERPRET", "1")  # SGLang's copy of tokens and its allocation
        return environ
    index = int(device.partition(":")[2])
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    environ["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) else str(index)
    return environ


def _device_in_child(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda:0"


def _record(found: list[KernelRecord]) -> None:
    """Store them; a pass of fewer cases does not replace what is known from more."""
    kept = []
    for record in found:
        known = next((other for other in kernel_records.records() if other.key == record.key), None)
        passed = record.hole_safe and record.top_ids
        if passed and known is not None and known.cases > record.cases:
            say(
                f"{record.engine} {record.backend}: not recorded, the record of {known.when} is of more cases"
            )
        else:
            kept.append(record)
    if kept:
        say(f"recorded in {kernel_records.store(kept)}")


def _engines(options: argparse.Namespace) -> list[str]:
    if options.self_test:
        options.backend = options.backend or list(CONTROLS)
        return ["control"]
    if options.engine != "auto":
        return [options.engine]
    return [engine for engine in BACKENDS if importlib.util.find_spec(engine) is not None]


def _default_backends(engine: str, device: str) -> tuple[str, ...]:
    return BACKENDS[engine][device.partition(":")[0]]


def _unusable(device: str) -> str | None:
    """Why there is no memory to be had on the device; None where there is."""
    try:
        _core.granularity(device)
    except KVCachedError as error:
        return str(error)
    return None


def _default_device() -> str:
    return "cpu" if _unusable("cuda:0") else "cuda:0"


def _judge_controls(verdicts: list[Verdict]) -> int:
    """0 where each control got the verdict that it must get."""
    wrong = []
    for verdict in verdicts:
        record = verdict.record
        found = (record.hole_safe, record.top_ids) if record else (None, None)
        pairs = zip(CONTROLS[verdict.backend], found, strict=True)
        if record is None or any(want is not None and want is not got for want, got in pairs):
            wrong.append(verdict.backend)
    say(
        f"self-test FAILED: {', '.join(wrong)}"
        if wrong
        else "self-test passed: right code passes, wrong code does not"
    )
    return 1 if wrong else 0


# ------------------------------------------------------------ what people see


def say(text: str) -> None:
    """Progress."""
    print(f"[verify] {text}", file=sys.stderr, flush=True)


def _show_verdicts(verdicts: list[Verdict]) -> None:
    rows = [("engine", "backend", "device", "hole-safe", "top ids", "")]
    for engine, backend, record, untested in verdicts:
        if record is None:
            rows.append((engine, backend, "", "-", "-", f"not tested: {untested}"))
        else:
            rows.append(
                (
                    f"{engine} {record.version}",
                    backend,
                    record.device,
                    _yes(record.hole_safe),
                    _yes(record.top_ids),
                    record.detail,
                )
            )
    _show(rows)


def _show_records(records: list[KernelRecord]) -> None:
    if not records:
        print("no records")
        return
    rows = [("engine", "backend", "device", "hole-safe", "top ids", "cases", "when", "machine")]
    rows += [
        (
            f"{record.engine} {record.version}",
            record.backend,
            record.device,
            _yes(record.hole_safe),
            _yes(record.top_ids),
            str(record.cases),
            record.when.isoformat(),
            record.machine,
        )
        for record in records
    ]
    _show(rows)


def _show(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _yes(answer: bool) -> str:
    return "yes" if answer else "NO"


def _as_json(verdict: Verdict) -> dict[str, object]:
    if verdict.record is not None:
        return verdict.record.to_json()
    return {"engine": verdict.engine, "backend": verdict.backend, "untested": verdict.untested}


# ------------------------------------------------------------ arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcached.verify_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine", choices=["auto", *BACKENDS], default="auto", help="default: each that is installed"
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help='by the engine\'s name ("TRITON_ATTN", "FLASH_ATTN/2"); may be repeated; default: those that a dense model may get',
    )
    parser.add_argument(
        "--device", type=_device, default=_default_device(), help='"cuda:N" or "cpu"; default: %(default)s'
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and batches")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one process (default: %(default).0f)",
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        default=max(1, min(4, (os.cpu_count() or 1) // 4)),
        metavar="N",
        help="backends at a time (default here: %(default)d); most of the time goes into starting engines",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--dry-run", action="store_true", help="record nothing")
    parser.add_argument(
        "--list", action="store_true", help="show the records that are known, and do nothing else"
    )
    parser.add_argument("--self-test", action="store_true", help=argparse.SUPPRESS)
    return parser


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 999")
    return int(text)


def _device(text: str) -> str:
    if text != "cpu" and not re.fullmatch(r"cuda:[0-9]{1,3}", text):
        raise argparse.ArgumentTypeError(f'{text!r} is not "cuda:N" or "cpu"')
    return text


if __name__ == "__main__":
    sys.exit(main())

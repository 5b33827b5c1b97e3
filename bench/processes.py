"""Processes that measure: each has a limit, leaves nothing behind, and says what it found in `SAMPLE {json}` lines."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAMPLE = "SAMPLE "
LAST_OUTPUT_S = 5.0

Sample = dict[str, Any]


class Ended(NamedTuple):
    """A process that is gone."""

    out: str
    err: str
    trouble: str  # "exit 3", "no end after 60 s"; empty where it ended well


def end_group(process: subprocess.Popen[Any]) -> None:
    """The process, and whatever it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(command: list[str], env: dict[str, str] | None = None, *, limit_s: float) -> Ended:
    """A process from its start to its end, which is after `limit_s` at the latest."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # and so a group of its own
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        trouble = f"exit {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        end_group(process)
        trouble = f"no end after {limit_s:.0f} s"
        try:
            out, err = process.communicate(timeout=LAST_OUTPUT_S)
        except subprocess.TimeoutExpired:  # somebody outside its group still has the pipes
            out, err = "", ""
    finally:
        end_group(process)
    return Ended(out, err, trouble)


def last_words(text: str) -> str:
    return "\n".join(f"    | {line[:300]}" for line in text.splitlines()[-12:])


def report(sample: Sample) -> None:
    """To the process that started this one; the last one counts."""
    print(SAMPLE + json.dumps(sample), flush=True)


def sample_of(command: list[str], env: dict[str, str] | None = None, *, limit_s: float) -> tuple[Sample, str]:
    """The last sample that the process reported, and what was wrong with its end; RuntimeError where it has none."""
    ended = run(command, env, limit_s=limit_s)
    found = [line for line in ended.out.splitlines() if line.startswith(SAMPLE)]
    if not found:
        raise RuntimeError(f"{ended.trouble or 'exit 0'}\n{last_words(ended.out + ended.err)}")
    trouble = f"{ended.trouble}\n{last_words(ended.err)}" if ended.trouble else ""
    return json.loads(found[-1][len(SAMPLE) :]), trouble


def built(result: pathlib.Path, command: list[str | pathlib.Path]) -> pathlib.Path | None:
    """What a compiler makes, None where it does not; why is printed."""
    try:
        done = subprocess.run([*command, "-o", result], capture_output=True, text=True, check=False)
    except OSError as error:
        print(f"{result.name} is not built: {error}", flush=True)
        return None
    if done.returncode:
        print(f"{result.name} is not built:\n{last_words(done.stderr)}", flush=True)
        return None
    return result


def built_calls(folder: pathlib.Path) -> pathlib.Path | None:
    """The library that counts driver calls where it is preloaded."""
    cc = shutil.which("cc") or "gcc"
    return built(folder / "calls.so", [cc, "-O2", "-shared", "-fPIC", ROOT / "bench" / "calls.c", "-ldl"])


def counted_calls() -> Callable[[], int] | None:
    """Asks how many driver calls this process has made; None where bench/calls.c is not loaded."""
    try:
        return ctypes.CDLL(None).counted_calls
    except AttributeError:
        return None


def machine() -> str:
    """The GPU and its driver, empty where that cannot be told."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

"""Engines that run side by side, each in a process of its own that begins a burst when it is told to, and all of their memory over time."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import harness
from bench.matrix import KVCACHED, command_of, environment_of, site_of
from bench.processes import ROOT, end_group
from demo.sampler import MARK

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

POLL_S = 0.02
END_LIMIT_S = 30


class EngineGoneError(Exception):
    """An engine's process is gone or silent; the message says where to look."""


class Session:
    """One engine's process, which begins a burst when told to.

    Args:
        engine: as in bench.matrix. label: of this process, also its instance's name.
        args: `out`, `limit_s`, `sites` and `run_options`, of which the latter go to the engine.
        elastic: with kvcached.
        environment: more of it.
    """

    def __init__(
        self,
        engine: str,
        label: str,
        args: argparse.Namespace,
        *,
        elastic: bool,
        prefix_caching: str = "off",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.label = label
        self.log = args.out / f"{self.label}.log"
        self._limit_s = args.limit_s
        self._tokens = args.out / "tokens"
        self._rest = ""
        self._rows: collections.deque[dict[str, Any]] = collections.deque()
        (module, *options), extra = command_of(engine)
        extra = {**extra, **(environment or {})}
        if elastic:
            extra = {**extra, **KVCACHED, "KVCACHED_IPC_NAME": self.label}
        paths = [os.environ.get("PYTHONPATH", ""), *site_of(engine, args.sites)]
        command = [sys.executable, "-m", module, *options, "--label", self.label, "--on-command"]
        command += ["--prefix-caching", prefix_caching, "--tokens-out", str(self._tokens), *args.run_options]
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_of(paths, extra),
                cwd=ROOT,
                process_group=0,
            )

        self._reader = self.log.open(errors="replace")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, failed: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends by itself, and its memory is free when it is gone
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if failed else END_LIMIT_S)
        end_group(self._process)
        self._reader.close()

    def wait(self, event: str) -> dict[str, Any]:
        """The next row of that event."""
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline:
            running = self._process.poll() is None
            *lines, self._rest = (self._rest + self._reader.read()).split("\n")
            self._rows.extend(json.loads(line[7:]) for line in lines if line.startswith("RESULT "))
            while self._rows:
                if (row := self._rows.popleft())["event"] == event:
                    return row
            if not running:
                break
            time.sleep(POLL_S)
        end = "".join(
            f"    | {line[:300]}\n" for line in self.log.read_text(errors="replace").split("\n")[-15:]
        )
        raise EngineGoneError(
            f"{self.label}: no `{event}`, exit code {self._process.poll()}; the end of its log:\n{end}"
        )

    def burst(self, seed: int = 1) -> tuple[dict[str, Any], harness.Tokens]:
        """Run one with the prompts of this seed; returns its row and the tokens."""
        self.begin(seed)
        return self.end()

    def begin(self, seed: int = 1) -> None:
        """Begin a burst."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"burst {seed}\n".encode())
        self._process.stdin.flush()

    def end(self) -> tuple[dict[str, Any], harness.Tokens]:
        """Wait for the end of the burst that was begun; returns its row and the tokens."""
        row = self.wait("pass")
        return row, json.loads((self._tokens / f"{self.label}-{row['number']}.json").read_text())


@dataclass
class Sample:
    """Memory at one moment: of the device, and of each instance what no other process can have."""

    time_s: float
    device_mib: int
    mapped_bytes: dict[str, int]


class Sampler(threading.Thread):
    """All instance records and the device's used memory, ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.sampler"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    def run(self) -> None:
        assert self._process.stdout is not None
        moment, used_mib, answer = 0.0, 0, ""
        for line in self._process.stdout:
            if not line.startswith(MARK):
                answer += line
                continue
            if answer:
                rows = json.loads(answer)["instances"]
                mapped = {row["name"]: row["used_bytes"] + row["reserved_bytes"] for row in rows}
                self.samples.append(Sample(moment, used_mib, mapped))
            moment, used_mib, answer = float(line.removeprefix(MARK)), harness.used_mib(), ""

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        self.join(timeout=5)

    def peak(self, name: str, begin: float, end: float) -> int:
        """The most that one instance had mapped between two moments, bytes."""
        inside = [s.mapped_bytes.get(name, 0) for s in self.samples if begin <= s.time_s <= end]
        return max(inside, default=0)

"""Run one engine with its bursts in a process of its own, and record its KV memory meanwhile."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any

from demo.engines import ENGINES
from demo.sampler import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from demo.engine import Job

START_LIMIT_S = 900
STEP_LIMIT_S = 600
TICK_S = 5
END_LIMIT_S = 60
# Of every engine; each has more (`demo.engine.Engine.environment`).
ENVIRONMENT = {
    # Threads that wait for each other by spinning cost more than they give, for a model this small.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class RunError(Exception):
    """The engine did not get through its bursts; the message says where to look."""


@dataclass(frozen=True)
class Sample:
    """KV memory at one moment, bytes."""

    time_s: float
    used: int
    reserved: int
    virtual: int

    @property
    def mapped(self) -> int:
        """Memory that no other process can have."""
        return self.used + self.reserved


@dataclass
class Burst:
    """One burst: when, and what came out."""

    begin_s: float
    end_s: float
    tokens: list[list[int]]
    peak_bytes: int = 0
    after_pause_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def tokens_out(self) -> int:
        return sum(map(len, self.tokens))


@dataclass
class Run:
    """One engine's story. Times are seconds since its first burst began."""

    engine: str  # a key of `demo.engines.ENGINES`
    elastic: bool
    prefix_caching: bool
    version: str = ""
    start_s: float = 0.0
    bursts: list[Burst] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rest_bytes: int = 0

    @property
    def title(self) -> str:
        """The engine's name and version."""
        return f"{ENGINES[self.engine].title} {self.version}"

    @property
    def memory(self) -> str:
        """Whose memory is under its KV cache."""
        return "kvcached" if self.elastic else "native"

    @property
    def tokens_per_s(self) -> float:
        return sum(b.tokens_out for b in self.bursts) / sum(b.seconds for b in self.bursts)

    @property
    def peak_bytes(self) -> int:
        return max(burst.peak_bytes for burst in self.bursts)

    @property
    def virtual_bytes(self) -> int:
        return max(sample.virtual for sample in self.samples)


class Sampler:
    """The instance record of one engine over time, as `kvctl list --json` shows it to other processes."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self.samples: list[Sample] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.sampler"], stdout=subprocess.PIPE, text=True, env=environment
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        moment, answer = 0.0, ""
        for line in self._process.stdout:
            if not line.startswith(MARK):
                answer += line
                continue
            self._note(moment, answer)
            moment, answer = float(line.removeprefix(MARK)), ""

    def _note(self, moment: float, answer: str) -> None:
        rows = json.loads(answer)["instances"] if answer else []
        for row in rows:
            if row["name"] == self.name:
                self.samples.append(
                    Sample(moment, row["used_bytes"], row["reserved_bytes"], row["virtual_bytes"])
                )

    def at(self, moment: float) -> Sample:
        """The last sample before that moment."""
        for sample in reversed(self.samples):
            if sample.time_s <= moment:
                return sample
        raise RunError(f"kvctl does not list {self.name}: the engine runs natively, and its log says why")

    def peak(self, begin: float, end: float) -> int:
        """The most that was mapped between two moments, bytes."""
        inside = [s.mapped for s in self.samples if begin <= s.time_s <= end]
        return max([self.at(end).mapped, *inside])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join(timeout=5)


def environment_of(job: Job) -> dict[str, str]:
    """This process's environment without kvcached, with what the engine needs where the user has not set it."""
    ours = ("KVCACHED_", "ENABLE_KVCACHED")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return ENVIRONMENT | ENGINES[job.engine].environment(job.device) | inherited


def run(job: Job, *, elastic: bool, log: Path) -> Run:
    """Start an engine, run the job, return its story; prints progress.

    Args:
        elastic: with `ENABLE_KVCACHED=true`, else without. log: where the engine's own output goes.
    """
    name = f"demo-{os.getpid()}"
    environment = environment_of(job)
    sampler_environment = dict(environment)
    if elastic:
        environment |= {"ENABLE_KVCACHED": "true", "KVCACHED_IPC_NAME": name}
    story = Run(job.engine, elastic, job.prefix_caching)
    read_fd, write_fd = os.pipe()
    with log.open("w") as output, os.fdopen(read_fd) as events:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "demo.worker", job.to_json(), str(write_fd)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[write_fd],
            )
        finally:
            os.close(write_fd)
        sampler = Sampler(name, sampler_environment) if elastic else None
        try:
            _follow(story, _events(events, process, log), sampler)
        except BaseException:
            process.kill()
            raise
        finally:
            _wait(process)
            if sampler:
                sampler.stop()
    return story


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _events(pipe: IO[str], process: subprocess.Popen[bytes], log: Path) -> Iterator[dict[str, Any]]:
    """The engine's events; shows that time passes while there is none."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in pipe:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    waiting_since, limit_s = time.monotonic(), START_LIMIT_S
    while True:
        try:
            line = lines.get(timeout=TICK_S)
        except queue.Empty:
            waited = time.monotonic() - waiting_since
            if waited > limit_s:
                raise RunError(f"no progress for {waited:.0f} s; the engine's log: {log}") from None
            print(f"    ... {waited:.0f} s", flush=True)
            continue
        if not line:
            code = process.wait()
            tail = "".join(f"    | {row}\n" for row in log.read_text(errors="replace").splitlines()[-12:])
            raise RunError(f"the engine ended early with exit code {code}; the end of {log}:\n{tail}")
        event = json.loads(line)
        waiting_since, limit_s = time.monotonic(), STEP_LIMIT_S
        yield event
        if event["event"] == "finished":
            return


def _follow(story: Run, events: Iterator[dict[str, Any]], sampler: Sampler | None) -> None:
    launched = time.monotonic()
    rest_s = origin = begun = 0.0
    constant = 0
    for event in events:
        kind, moment = event["event"], event["time"]
        if kind == "started":
            story.version, story.start_s = event["version"], moment - launched
            constant = event["kv_cache_bytes"]
            print(f"    {story.title} started in {story.start_s:.0f} s", flush=True)
        elif kind == "rest":
            rest_s = moment
            story.rest_bytes = sampler.at(moment).mapped if sampler else constant
        elif kind == "burst":
            begun = moment
            origin = origin or moment
        elif kind == "burst_done":
            story.bursts.append(Burst(begun - origin, moment - origin, event["tokens"]))
        elif kind == "paused":
            burst = story.bursts[-1]
            burst.peak_bytes = sampler.peak(begun, moment) if sampler else constant
            burst.after_pause_bytes = sampler.at(moment).mapped if sampler else constant
            print(
                f"    burst {event['index'] + 1}: {len(burst.tokens)} requests, {burst.tokens_out} tokens in "
                f"{burst.seconds:.1f} s; KV memory {_mib(burst.peak_bytes)}, after the pause "
                f"{_mib(burst.after_pause_bytes)}",
                flush=True,
            )
        elif kind == "finished":
            found = (
                [s for s in sampler.samples if rest_s <= s.time_s <= moment]
                if sampler
                else [Sample(rest_s, constant, 0, constant), Sample(moment, constant, 0, constant)]
            )
            story.samples = [replace(s, time_s=s.time_s - origin) for s in found]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"

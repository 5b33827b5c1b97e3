"""vLLM and SGLang with kvcached on one GPU, bursts in turn, each of which needs more than half of the room for KV cache.

    python -m bench.two_engines --engines 0.29.0 sglang-0.5.17-p1 --out out/two

Neither engine could have that much for itself on a card cut in two. Both start once and stay; one bursts while the other idles and holds only
its reserve. Then each runs the same bursts natively with the card to itself, and tokens are compared with those (bench.tables.compare: a claim
only where native repeats itself). Every burst has the same prompts: between two of them the memory was the other engine's. Prefix caching is
off in both: cached prefixes stay while there is room, and when they go back for a neighbour's sake is the rule of a later issue.

The model is 1b-mha with random weights (demo/model.py): its 128 KiB of KV cache a token let little work fill a large card. 128 requests of 4,400
tokens in and 128 out are 579,584 tokens, 70.8 GiB, of the 125-130 GiB that two engines leave of 140. They are all in flight at
once: SGLang prefills all first, vLLM needs about 35 steps of 16,384 tokens to prefill and 128 to end.

Written into --out: two.json, two.png (mapped KV memory of both by `kvctl list --json`, and the device's used memory, at 10 Hz), a log of each engine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bench import harness, tables
from bench.matrix import KVCACHED, command_of, environment_of, site_of
from bench.processes import ROOT, end_group
from demo.sampler import MARK

if TYPE_CHECKING:
    from types import TracebackType

GIB = 2**30
COLOURS = ("#0b7285", "#c2410c")
DEVICE_COLOUR = "#8a8f98"
POLL_S = 0.02
END_LIMIT_S = 30


class EngineGoneError(Exception):
    """An engine's process is gone or silent; the message says where to look."""


class Session:
    """One engine's process, which begins a burst when told to."""

    def __init__(self, engine: str, kind: str, args: argparse.Namespace) -> None:
        self.label = f"{engine}-{kind}"
        self.log = args.out / f"{self.label}.log"
        self._limit_s = args.limit_s
        self._tokens = args.out / "tokens"
        self._rest = ""
        self._rows: collections.deque[dict[str, Any]] = collections.deque()
        (module, *options), extra = command_of(engine)
        if kind == "ours":
            extra = {**extra, **KVCACHED, "KVCACHED_IPC_NAME": self.label}
        paths = [os.environ.get("PYTHONPATH", ""), *site_of(engine, args.sites)]
        command = [sys.executable, "-m", module, *options, "--label", self.label, "--on-command"]
        command += ["--prefix-caching", "off", "--tokens-out", str(self._tokens), *args.run_options]
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

    def burst(self) -> tuple[dict[str, Any], harness.Tokens]:
        """Run one; returns its row and the tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"burst\n")
        self._process.stdin.flush()
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


@dataclass
class Burst:
    """One engine's burst while the other idled. Times are seconds since the first burst began."""

    engine: str
    begin_s: float
    end_s: float
    output_tokens_per_s: float
    peak_bytes: int
    neighbour_peak_bytes: int
    tokens: harness.Tokens = field(repr=False)


@dataclass
class Together:
    """Both engines on one card."""

    room_bytes: int  # for KV cache: what the device has beside the two engines at rest
    total_mib: int
    bursts: list[Burst]
    samples: list[Sample]


def together(args: argparse.Namespace) -> Together:
    """Both with kvcached; A bursts, B bursts, and so on."""
    with (
        Sampler() as sampler,
        Session(args.engines[0], "ours", args) as a,
        Session(args.engines[1], "ours", args) as b,
    ):
        for session in (a, b):
            ready = session.wait("ready")
            print(f"    {session.label} ready, KV memory {ready['kv']}", flush=True)
        time.sleep(args.pause)
        device, rest = harness.device_memory(), sampler.samples[-1]
        room = (device.total_mib - device.used_mib << 20) + sum(rest.mapped_bytes.values())
        origin, bursts = time.monotonic(), []
        for _ in range(args.rounds):
            for session, engine, neighbour in ((a, args.engines[0], b), (b, args.engines[1], a)):
                begin = time.monotonic()
                row, tokens = session.burst()
                end = time.monotonic()
                time.sleep(args.pause)
                peak = sampler.peak(session.label, begin, end)
                other = sampler.peak(neighbour.label, begin + 0.2, end)
                bursts.append(
                    Burst(
                        engine, begin - origin, end - origin, row["output_tokens_per_s"], peak, other, tokens
                    )
                )
                print(f"    {engine}: {end - begin:.1f} s, KV memory {peak / GIB:.1f} GiB", flush=True)
        samples = [Sample(s.time_s - origin, s.device_mib, s.mapped_bytes) for s in sampler.samples]
    return Together(room, device.total_mib, bursts, [s for s in samples if s.time_s >= -2 * args.pause])


def alone(engine: str, args: argparse.Namespace) -> list[tuple[float, harness.Tokens]]:
    """Output tokens/s and tokens of the same bursts, natively, with the card for itself."""
    with Session(engine, "native", args) as session:
        session.wait("ready")
        done = [session.burst() for _ in range(max(2, args.rounds))]  # two: does native repeat itself?
    print(f"    {engine} natively: {[row['seconds'] for row, _ in done]} s", flush=True)
    return [(row["output_tokens_per_s"], tokens) for row, tokens in done]


def table(shared: Together, native: dict[str, list[tuple[float, harness.Tokens]]]) -> str:
    """A row for each burst."""
    lines = [
        f"room for KV cache: {shared.room_bytes / GIB:.1f} GiB",
        "| burst | engine | seconds | output tokens/s | natively, alone | KV memory, GiB | of the room "
        "| the other engine's | tokens, against native alone |",
        "|--:|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for index, burst in enumerate(shared.bursts):
        said, alone_speed = "not run", float("nan")
        if burst.engine in native:
            (alone_speed, first), (_, second) = native[burst.engine][:2]
            said = tables.compare(first, second, burst.tokens)
        lines.append(
            f"| {index + 1} | {burst.engine} | {burst.end_s - burst.begin_s:.1f} | {burst.output_tokens_per_s:,.0f} "
            f"| {alone_speed:,.0f} | {burst.peak_bytes / GIB:.1f} | {burst.peak_bytes / max(1, shared.room_bytes):.0%} "
            f"| {burst.neighbour_peak_bytes / GIB:.2f} | {said} |"
        )
    return "\n".join(lines)


def plot(shared: Together, engines: list[str], path: pathlib.Path) -> None:
    """Both engines' mapped KV memory over time, and the device's used memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    colours = dict(zip(engines, COLOURS, strict=True))
    for burst in shared.bursts:
        axes.axvspan(burst.begin_s, burst.end_s, color=colours[burst.engine], alpha=0.08, lw=0)
    times = [s.time_s for s in shared.samples]
    for engine, colour in colours.items():
        mapped = [s.mapped_bytes.get(f"{engine}-ours", 0) / GIB for s in shared.samples]
        axes.step(times, mapped, where="post", color=colour, lw=1.8, label=f"KV memory of {engine}")
    device = [s.device_mib / 1024 for s in shared.samples]
    axes.step(times, device, where="post", color=DEVICE_COLOUR, lw=1.2, label="the device, all it holds")
    axes.axhline(shared.total_mib / 1024, color=DEVICE_COLOUR, lw=0.8, ls="--", label="the device's size")
    axes.axhline(
        shared.room_bytes / 2 / GIB, color="#846200", lw=0.8, ls=":", label="half of the room for KV"
    )
    axes.set_xlabel("seconds since the first burst")
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.set_title("Two engines on one GPU, bursts in turn", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def record(shared: Together, native: dict[str, list[tuple[float, harness.Tokens]]]) -> dict[str, Any]:
    """For two.json; a digest stands for the tokens."""
    bursts = [asdict(burst) | {"tokens": harness.digest(burst.tokens)} for burst in shared.bursts]
    runs = {
        engine: [(speed, harness.digest(tokens)) for speed, tokens in done] for engine, done in native.items()
    }
    return asdict(shared) | {"bursts": bursts, "native_tokens_per_s_and_digest": runs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs=2, default=["0.29.0", "sglang-0.5.17-p1"], help="as in bench.matrix"
    )
    parser.add_argument("--site", action="append", default=[], help="as in bench.matrix")
    parser.add_argument("--rounds", type=int, default=2, help="bursts of each engine")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between bursts")
    parser.add_argument("--size", default="1b-mha")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-tokens", type=int, default=4400)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument(
        "--fraction", type=float, default=0.8, help="what each engine may count on, weights included"
    )
    parser.add_argument("--limit-s", type=int, default=240, help="for a start and for a burst")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.sites = dict(item.split("=", 1) for item in args.site)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    args.run_options = ["--passes", "1000", "--size", args.size, "--fraction", str(args.fraction)]
    args.run_options += ["--requests", str(args.requests), "--max-running", str(args.requests)]
    args.run_options += ["--input-tokens", str(args.input_tokens), "--output-tokens", str(args.output_tokens)]
    args.run_options += sys.argv[at + 1 :]
    shared = together(args)
    plot(shared, args.engines, args.out / "two.png")
    native: dict[str, list[tuple[float, harness.Tokens]]] = {}
    for engine in (None, *args.engines):
        if engine:
            native[engine] = alone(engine, args)
        (args.out / "two.json").write_text(json.dumps(record(shared, native), indent=1))
        print(table(shared, native), flush=True)


if __name__ == "__main__":
    main()

"""Engines with kvcached on one GPU: started together, beside a loaded neighbour, and both under a load that two halves would not bear.

    python -m bench.sharing --engines 0.29.0 0.29.0 sglang-0.5.17-p1 --shows start beside load --invariant --out out/sharing

Every engine runs once natively and once with kvcached with the card to itself: its tokens, and the capacity that it gets. Then, prefix
caching on:

`start`: all are started at the same moment, then burst at the same moment, each with prompts of its own. `beside`: the first fills the
card with cached prefixes and is in a burst when the second is started, which then bursts; the first comes back to its oldest prompts.
`load`: the first two burst at the same moment, twice, each with more than half of the room for KV cache.

Capacity is compared with that alone, tokens with native's alone (bench.tables.compare: a claim only where native repeats itself). Who
waits for memory runs other batches than alone, which changes roundings: `--invariant` has vLLM use kernels that batches do not change
(VLLM_BATCH_INVARIANT), natively too. SGLang has them by its name, as `sglang-0.5.17-p1-det`. Requests and model as in bench.two_engines.

Written into --out: sharing.json, a plot of each show (KV memory of every instance by `kvctl list --json`, and the device's, at 10 Hz), and
a log of each engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bench import harness, tables
from bench.sessions import EngineGoneError, Sample, Sampler, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 2**30
COLOURS = ("#0b7285", "#c2410c", "#5f3dc4", "#2b8a3e")
DEVICE_COLOUR = "#8a8f98"
SEEDS = (10, 11, 12, 13)
"""Of each engine's own prompts; those of its warm-up are others."""
FILLING = (20, 21, 22)


@dataclass
class Alone:
    """One engine with the card to itself."""

    native_kv_tokens: int
    kv_tokens: int
    tokens: dict[int, list[harness.Tokens]] = field(repr=False)
    """By the prompts' seed, natively, twice."""
    seconds: float


@dataclass
class Burst:
    """Of one engine, beside others. Times in seconds since the show began."""

    label: str
    seed: int
    begin_s: float
    end_s: float
    cached_tokens: int
    against_native: str


@dataclass
class Show:
    """What several engines did together."""

    name: str
    capacity: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens of KV cache that each counts on, here and alone."""
    bursts: list[Burst] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list, repr=False)
    trouble: str = ""


class Stage:
    """Where the engines of one show run. Everything on it ends with it."""

    def __init__(self, show: Show, alone: dict[str, Alone], args: argparse.Namespace) -> None:
        self.show = show
        self._alone, self._args = alone, args
        self._stack = contextlib.ExitStack()
        self._engine_of: dict[str, str] = {}

    def __enter__(self) -> Stage:
        self._sampler = self._stack.enter_context(Sampler())
        self._origin = time.monotonic()
        return self

    def __exit__(self, *failed: Any) -> None:
        self._stack.__exit__(*failed)
        show = self.show
        show.samples = [
            Sample(s.time_s - self._origin, s.device_mib, s.mapped_bytes) for s in self._sampler.samples
        ]
        for label in self._engine_of:
            show.peak_bytes[label] = max((s.mapped_bytes.get(label, 0) for s in show.samples), default=0)

    def launch(self, place: int) -> Session:
        """The process of an engine; it is not ready yet."""
        engine = self._args.engines[place]
        label = f"{place}-{engine}"
        self._engine_of[label] = engine
        session = Session(
            engine, label, self._args, elastic=True, prefix_caching="on", environment=self._args.environment
        )
        return self._stack.enter_context(session)

    def ready(self, session: Session) -> None:
        """Waits until the engine serves, and notes the capacity that it got."""
        found = session.wait("start")["kv_tokens"]
        session.wait("ready")
        self.show.capacity[session.label] = (found, self._alone[self._engine_of[session.label]].kv_tokens)
        print(f"    {session.label}: {found:,} tokens", flush=True)

    def bursts(self, *of: tuple[Session, int]) -> None:
        """All at the same moment, each with prompts of its seed."""
        begin = time.monotonic() - self._origin
        for session, seed in of:
            session.begin(seed)
        for session, seed in of:
            self.end(session, seed, begin)

    def end(self, session: Session, seed: int, begin: float) -> None:
        """Waits for a burst that was begun."""
        row, tokens = session.end()
        native = self._alone[self._engine_of[session.label]].tokens.get(seed)
        said = "-" if native is None else tables.compare(native[0], native[1], tokens)
        end = begin + row["seconds"]
        self.show.bursts.append(Burst(session.label, seed, begin, end, row["cached_tokens"], said))
        print(f"    {session.label}, prompts {seed}: {row['seconds']:.1f} s, tokens {said}", flush=True)

    def now(self) -> float:
        return time.monotonic() - self._origin


def start(stage: Stage, engines: int) -> None:
    """All at the same moment."""
    sessions = [stage.launch(place) for place in range(engines)]
    for session in sessions:
        stage.ready(session)
    stage.bursts(*zip(sessions, SEEDS, strict=False))


def beside(stage: Stage, _: int) -> None:
    """The second is started while the first is in a burst and has filled the card with prefixes."""
    first = stage.launch(0)
    stage.ready(first)
    for seed in FILLING:
        stage.bursts((first, seed))
    begin = stage.now()
    first.begin(SEEDS[0])
    second = stage.launch(1)
    stage.end(first, SEEDS[0], begin)
    stage.ready(second)
    stage.bursts((second, SEEDS[1]))
    stage.bursts((first, FILLING[0]))
    stage.bursts((first, SEEDS[0]), (second, SEEDS[1]))


def load(stage: Stage, _: int) -> None:
    """The first two at the same moment, twice."""
    sessions = [stage.launch(place) for place in range(2)]
    for session in sessions:
        stage.ready(session)
    for _again in range(2):
        stage.bursts(*zip(sessions, SEEDS, strict=False))


SHOWS: dict[str, Callable[[Stage, int], None]] = {"start": start, "beside": beside, "load": load}


def alone(engine: str, args: argparse.Namespace) -> Alone:
    """Natively, for the tokens, and with kvcached, for the capacity; prefix caching on."""
    common: dict[str, Any] = {"prefix_caching": "on", "environment": args.environment}
    tokens: dict[int, list[harness.Tokens]] = {}
    seconds = 0.0
    places = [place for place, other in enumerate(args.engines) if other == engine]
    seeds = {SEEDS[place] for place in places} | ({FILLING[0]} if 0 in places else set())
    with Session(engine, f"{engine}-native", args, elastic=False, **common) as session:
        native = session.wait("start")["kv_tokens"]
        session.wait("ready")
        for seed in sorted(seeds) * 2:  # does it repeat itself?
            row, found = session.burst(seed)
            tokens.setdefault(seed, []).append(found)
            seconds = seconds or row["seconds"]
    with Session(engine, f"{engine}-alone", args, elastic=True, **common) as session:
        capacity = session.wait("start")["kv_tokens"]
        session.wait("ready")
    print(f"    {engine} alone: {capacity:,} tokens, natively {native:,}; burst {seconds:.1f} s", flush=True)
    return Alone(native, capacity, tokens, seconds)


def table(show: Show) -> str:
    """A row for each engine, and one for each burst."""
    lines = [f"**{show.name}**{f': {show.trouble}' if show.trouble else ''}", ""]
    lines += ["| engine | KV cache, tokens | alone | ratio | most mapped, GiB |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {label} | {here:,} | {by_itself:,} | {here / by_itself:.3f} | {show.peak_bytes.get(label, 0) / GIB:.1f} |"
        for label, (here, by_itself) in show.capacity.items()
    ]
    lines += ["", "| engine | prompts | from, s | seconds | tokens hit | tokens, against native alone |"]
    lines += ["|---|--:|--:|--:|--:|---|"]
    lines += [
        f"| {b.label} | {b.seed} | {b.begin_s:.0f} | {b.end_s - b.begin_s:.1f} | {b.cached_tokens:,} | {b.against_native} |"
        for b in show.bursts
    ]
    return "\n".join(lines)


def plot(show: Show, path: pathlib.Path) -> None:
    """KV memory of each engine over time, and what the device holds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    times = [s.time_s for s in show.samples]
    for label, colour in zip(show.capacity, COLOURS, strict=False):
        for burst in (b for b in show.bursts if b.label == label):
            axes.axvspan(burst.begin_s, burst.end_s, color=colour, alpha=0.07, lw=0)
        mapped = [s.mapped_bytes.get(label, 0) / GIB for s in show.samples]
        axes.step(times, mapped, where="post", color=colour, lw=1.8, label=f"KV memory of {label}")
    device = [s.device_mib / 1024 for s in show.samples]
    axes.step(times, device, where="post", color=DEVICE_COLOUR, lw=1.2, label="the device, all it holds")
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{show.name}: {', '.join(show.capacity)}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def record(shows: list[Show], by_itself: dict[str, Alone]) -> dict[str, Any]:
    """For sharing.json; digests stand for tokens."""
    natives = {
        engine: asdict(found)
        | {"tokens": {seed: [harness.digest(t) for t in runs] for seed, runs in found.tokens.items()}}
        for engine, found in by_itself.items()
    }
    return {"alone": natives, "shows": [asdict(show) for show in shows]}


def performed(args: argparse.Namespace, by_itself: dict[str, Alone]) -> Iterator[Show]:
    """One show after the other; an engine that dies ends its show, not the others."""
    for name in args.shows:
        print(f"{name}:", flush=True)
        show = Show(name)
        try:
            with Stage(show, by_itself, args) as stage:
                SHOWS[name](stage, len(args.engines))
        except EngineGoneError as error:
            show.trouble = f"AN ENGINE DIED: {str(error).splitlines()[0]}"
            print(error, flush=True)
        yield show


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", default=["0.29.0"] * 3, help="two to four, as in bench.matrix"
    )
    parser.add_argument("--shows", nargs="+", choices=SHOWS, default=list(SHOWS))
    parser.add_argument("--site", action="append", default=[], help="as in bench.matrix")
    parser.add_argument("--invariant", action="store_true", help="vLLM: kernels that batches do not change")
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
    if not 2 <= len(args.engines) <= len(SEEDS):
        parser.error(f"--engines takes two to {len(SEEDS)}")
    args.sites = dict(item.split("=", 1) for item in args.site)
    args.environment = {"VLLM_BATCH_INVARIANT": "1"} if args.invariant else {}
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    args.run_options = ["--passes", "1000", "--size", args.size, "--fraction", str(args.fraction)]
    args.run_options += ["--requests", str(args.requests), "--max-running", str(args.requests)]
    args.run_options += ["--input-tokens", str(args.input_tokens), "--output-tokens", str(args.output_tokens)]
    args.run_options += sys.argv[at + 1 :]
    by_itself = {engine: alone(engine, args) for engine in dict.fromkeys(args.engines)}
    shows: list[Show] = []
    for show in performed(args, by_itself):
        shows.append(show)
        (args.out / "sharing.json").write_text(json.dumps(record(shows, by_itself), indent=1))
        print(f"\n{table(show)}\n", flush=True)
        plot(show, args.out / f"{show.name}.png")
    if any(show.trouble for show in shows):
        sys.exit(1)


if __name__ == "__main__":
    main()

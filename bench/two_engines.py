"""vLLM and SGLang with kvcached on one GPU, bursts in turn, each of which needs more than half of the room for KV cache.

    python -m bench.two_engines --engines 0.29.0 sglang-0.5.17-p1 --out out/two

Neither engine could have that much for itself on a card cut in two. Both start once and stay; one bursts while the other idles and holds only
its reserve. Then each runs the same bursts natively with the card to itself, and tokens are compared with those (bench.tables.compare: a claim
only where native repeats itself). Every burst has the same prompts: between two of them the memory was the other engine's. Prefix caching is
off in both: what becomes of cached prefixes is shown by bench.sharing.

The model is 1b-mha with random weights (demo/model.py): its 128 KiB of KV cache a token let little work fill a large card. 128 requests of 4,400
tokens in and 128 out are 579,584 tokens, 70.8 GiB, of the 125-130 GiB that two engines leave of 140. They are all in flight at
once: SGLang prefills all first, vLLM needs about 35 steps of 16,384 tokens to prefill and 128 to end.

Written into --out: two.json, two.png (mapped KV memory of both by `kvctl list --json`, and the device's used memory, at 10 Hz), a log of each engine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from bench import harness, tables
from bench.sessions import Sample, Sampler, Session

GIB = 2**30
COLOURS = ("#0b7285", "#c2410c")
DEVICE_COLOUR = "#8a8f98"


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
        Session(args.engines[0], f"{args.engines[0]}-ours", args, elastic=True) as a,
        Session(args.engines[1], f"{args.engines[1]}-ours", args, elastic=True) as b,
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
    with Session(engine, f"{engine}-native", args, elastic=False) as session:
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

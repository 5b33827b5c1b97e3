"""Bookkeeping of blocks through the Python API: kvcached and the peer in one run; a table of docs/FIGURES.md.

    python -m bench.alloc --peer /tmp/peer-src/kvcached-0.1.6 --out out/alloc.json
    python -m bench.alloc --device cpu --quick                # ours only, on ordinary memory: no GPU needed
    python -m bench.alloc --tables out/alloc.json             # the tables of a run again

Cases: `sizes` (alloc and free of 1 to 4,096 blocks out of as few partial pages as hold them, available_size), `partial` (of one block
among 1, 100 and 1,000 partial pages), `holes` (of 256 blocks where the only free ones are 1,000, each in a page of its own), `reserve`
(a page that is mapped and idle), `emptying` and `emptying-64` (frees that empty a page each, page after page, while memory goes back).
Ids are lists, and numpy arrays as well where the manager has `alloc_array` and `alloc_into`.

All but the last case: 2 layers' K and V with 64 blocks a page in both (8 MiB; of 32 layers 1,000 pages of the peer's would not fit a
card). `emptying-64`: 32 layers, pages of 16 MiB with 8 blocks, beside the peer's own of 128 MiB with 64.

A median is of batches long enough for the clock; p99 and maximum are of single calls, the clock's own cost (`clock_us`) in them. The peer
is the public package kvcached, a black box: what it was given and the signatures that it tells are in --out. Every measurement is a
process of its own, and each round runs ours and the peer of a case after each other. A `RESULT {json}` line for each figure; medians
over the rounds in the table; all in --out. What fails says so, and the rest goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fnmatch
import gc
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import peer as package
from bench.managers import ROUTES, Blocks, Ours, Peer, Shape, UnmeasuredError, settle
from bench.processes import Sample, built_calls, counted_calls, machine, report, sample_of
from bench.tables import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bench.managers import Subject

clock = time.perf_counter_ns
SIZES = (1, 16, 256, 4096)
PARTIAL = (1, 100, 1000)
HOLES = 1000
HOLE_BLOCKS = 256
PAGES, SPARE_PAGES = 2048, 8
STREAM_PAGES = 512
STREAM_PASSES = 8
PACE_NS = 100_000  # the driver has taken a page back by then
STREAM_LIMIT_S = 20.0
VARIANTS = {"": "", "-array": ", `alloc_array`", "-into": ", `alloc_into`"}
CLOCKS_A_CALL, CLOCKS_A_BATCH = 50, 200  # so long that the clock's own cost does not count
LEAST_REPEATS, MOST_REPEATS = 10, 50_000
FIGURE_LIMIT_S = 20.0
START_LIMIT_S = 90
END_LIMIT_S = 5
FEW_BUFFERS, MODEL = Shape(layers=2, page_blocks=64), Shape(layers=32, page_blocks=8)


# ---------------------------------------------------------------- timing


def clock_cost_ns() -> float:
    stamps = [clock() for _ in range(1001)]
    return statistics.median(after - before for before, after in pairwise(stamps))


def percentile(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]


def summary(median_ns: float, singles_ns: list[float]) -> Sample:
    ordered = sorted(singles_ns)
    figures = {"median": median_ns, "p99": percentile(ordered, 0.99), "max": ordered[-1]}
    return {f"{name}_us": round(ns / 1e3, 4) for name, ns in figures.items()} | {"repeats": len(ordered)}


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's own pauses are nobody's figure."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def sampled(batch: Callable[[int], None], size: int, seconds: float) -> list[float]:
    """Nanoseconds of one, in each of many batches."""
    found: list[float] = []
    begin = clock()
    enough, limit = begin + seconds * 1e9, begin + FIGURE_LIMIT_S * 1e9
    end = begin
    while (
        not found
        or (end < enough and len(found) < MOST_REPEATS)
        or (len(found) < LEAST_REPEATS and end < limit)
    ):
        start = clock()
        batch(size)
        end = clock()
        found.append((end - start) / size)
    return found


def timed(batch: Callable[[int], None], seconds: float) -> Sample:
    """A median over batches, the rest over single calls."""
    clock_ns, count = clock_cost_ns(), counted_calls()
    with no_collection():
        once = min(sampled(batch, 1, 0.0))
        before = count() if count else 0
        size = 1
        if once < CLOCKS_A_CALL * clock_ns:
            seconds /= 2
            size = math.ceil(CLOCKS_A_BATCH * clock_ns / max(once - clock_ns, 10))
        singles = sampled(batch, 1, seconds)
        batches = sampled(batch, size, seconds) if size > 1 else singles
        done = len(singles) + (len(batches) * size if size > 1 else 0)
        calls = {"driver_calls": round((count() - before) / done, 4)} if count else {}
    return summary(statistics.median(batches), singles) | {"batches": len(batches), "batch": size} | calls


# ---------------------------------------------------------------- what is timed


def cycles(manager: Any, n: int) -> dict[str, Callable[[int], None]]:
    """alloc(n) and free of it, in each form of ids that the manager has, by the form's name in VARIANTS."""
    alloc, free = manager.alloc, manager.free

    def lists(times: int) -> None:
        for _ in repeat(None, times):
            free(alloc(n))

    found: dict[str, Callable[[int], None]] = {"": lists}
    if alloc_array := getattr(manager, "alloc_array", None):

        def arrays(times: int) -> None:
            for _ in repeat(None, times):
                free(alloc_array(n))

        found["-array"] = arrays
    if alloc_into := getattr(manager, "alloc_into", None):
        import numpy as np

        ids = np.empty(n, np.int64)

        def into(times: int) -> None:
            for _ in repeat(None, times):
                if not alloc_into(ids):
                    raise UnmeasuredError(f"alloc_into of {n} ids answers False")
                free(ids)

        found["-into"] = into
    return found


def stream(free: Callable[[list[int]], object], pages: list[list[int]], pace_ns: int) -> list[float]:
    """Nanoseconds of each free, one begun every `pace_ns`."""
    found: list[float] = []
    with no_collection():
        due = clock()
        for ids in pages:
            due += pace_ns
            start = clock()
            free(ids)
            end = clock()
            found.append(end - start)
            while end < due:
                end = clock()
    return found


class Bench:
    """One manager and what was found of it, reported as it comes."""

    def __init__(self, subject: Subject, args: argparse.Namespace) -> None:
        self.subject, self.blocks = subject, Blocks(subject)
        self._seconds, self._quick = args.seconds, args.quick
        about = {**subject.about, "page_blocks": subject.page_blocks, "page_bytes": subject.page_bytes}
        about["clock_us"] = clock_cost_ns() / 1e3
        self.sample: Sample = {"figures": {}, "failed": {}, "about": about, "running": None}
        report(self.sample)

    @contextlib.contextmanager
    def step(self, key: str) -> Iterator[None]:
        """What fails in it is told, and the next step is taken."""
        around = self.sample["running"]
        self.sample["running"] = key
        report(self.sample)
        try:
            yield
        except (Exception, SystemExit) as error:
            self.sample["failed"][key] = f"{type(error).__name__}: {error}"
        self.sample["running"] = around
        report(self.sample)

    def time_cycles(self, key: str, n: int) -> None:
        """alloc(n) and free, as the blocks stand now."""
        manager, pages_of = self.subject.manager, self.subject.pages_of
        for variant, batch in cycles(manager, n).items():
            with self.step(key + variant):
                settle(self.subject)
                ids = manager.alloc(n)
                if ids is None or len(set(ids)) != n:
                    raise UnmeasuredError(
                        f"alloc({n}) gave {'None' if ids is None else f'{len(set(ids))} ids'}"
                    )
                touched = {"pages": len(set(pages_of(ids)))}
                if (backed := self.subject.backed_bytes()) is not None:
                    touched["backed_pages"] = round(backed / self.subject.page_bytes)
                manager.free(ids)
                found = timed(batch, self._seconds) | touched
                self.sample["figures"][key + variant] = found

    def sizes(self) -> None:
        """Out of pages with one block held, as few as have n free: no page is emptied or filled for good."""
        for n in SIZES:
            with self.step(f"alloc-{n}"):
                self.blocks.clear()
                for page in self.blocks.whole(-(-n // (self.subject.page_blocks - 1))):
                    self.blocks.free(page, slice(1, None))
                self.time_cycles(f"alloc-{n}", n)
        with self.step("available"):
            available_size = self.subject.manager.available_size

            def batch(times: int) -> None:
                for _ in repeat(None, times):
                    available_size()

            self.sample["figures"]["available"] = timed(batch, self._seconds)

    def partial(self) -> None:
        """Pages that differ in how many blocks are free, two at least and two held: alloc(1) fills and empties none."""
        most = self.subject.page_blocks - 2
        for count in PARTIAL:
            with self.step(f"partial-{count}"):
                self.blocks.clear()
                for number_of, page in enumerate(self.blocks.whole(count)):
                    self.blocks.free(page, slice(2 + number_of % (most - 1)))
                self.time_cycles(f"partial-{count}", 1)

    def holes(self) -> None:
        """Every block of the pool is held but one in each of so many pages."""
        with self.step("holes"):
            pages = self.blocks.exhaust()
            if len(pages) < HOLES:
                raise UnmeasuredError(f"{len(pages)} pages can be held whole, not {HOLES}")
            for number_of, page in enumerate(pages[:HOLES]):
                place = number_of % self.subject.page_blocks
                self.blocks.free(page, slice(place, place + 1))
            self.sample["about"]["available_over_holes"] = self.subject.manager.available_size()
            self.time_cycles("holes", HOLE_BLOCKS)

    def reserve(self) -> None:
        """No page is in use: one comes out of the reserve and goes back to it."""
        with self.step("reserve-page"):
            self.blocks.take(self.subject.page_blocks)
            self.blocks.clear()
            self.time_cycles("reserve-page", self.subject.page_blocks)
        with self.step("reserve-one"):
            self.time_cycles("reserve-one", 1)

    def emptying(self) -> None:
        """Pages held whole are freed one by one, as fast as that goes and at a pace."""
        count, passes = (64, 2) if self._quick else (STREAM_PAGES, STREAM_PASSES)
        for key, pace_ns in (("free", 0), ("free-paced", PACE_NS)):
            with self.step(key):
                self.sample["figures"][key] = self._streams(count, passes, pace_ns)

    def _streams(self, count: int, passes: int, pace_ns: int) -> Sample:
        subject, calls = self.subject, counted_calls()
        found: list[float] = []
        gone: list[
            tuple[float, float]
        ] = []  # pages given back, when the last free returned and when it was quiet
        limit, done, driver_calls = time.monotonic() + STREAM_LIMIT_S, 0, 0
        while not done or (done < passes and time.monotonic() < limit):
            pages = [self.blocks.forget(page) for page in self.blocks.whole(count)]
            settle(subject)
            counted, backed = calls() if calls else 0, subject.backed_bytes()
            found += stream(subject.manager.free, pages, pace_ns)
            then = subject.backed_bytes()
            settle(subject)
            driver_calls += calls() - counted if calls else 0
            left = subject.backed_bytes()
            if backed is not None and then is not None and left is not None:
                gone.append(((backed - then) / subject.page_bytes, (backed - left) / subject.page_bytes))
            done += 1
        result = summary(statistics.median(found), found) | {"pages": count, "passes": done}
        for name, column in zip(("gone_at_last_free", "gone_after"), zip(*gone, strict=True), strict=False):
            result[name] = round(statistics.median(column), 1)
        return result | ({"driver_calls": round(driver_calls / len(found), 4)} if calls else {})


class Case(NamedTuple):
    """What one process measures."""

    name: str
    shape: Shape
    pages: int
    measure: Callable[[Bench], None]


CASES = [
    Case("sizes", FEW_BUFFERS, PAGES, Bench.sizes),
    Case("partial", FEW_BUFFERS, PAGES, Bench.partial),
    Case("holes", FEW_BUFFERS, HOLES + SPARE_PAGES, Bench.holes),
    Case("reserve", FEW_BUFFERS, PAGES, Bench.reserve),
    Case("emptying", FEW_BUFFERS, STREAM_PAGES + SPARE_PAGES, Bench.emptying),
    Case("emptying-64", MODEL, STREAM_PAGES + SPARE_PAGES, Bench.emptying),
]


def subject_of(case: Case, who: str, args: argparse.Namespace) -> Subject:
    """Whom a process measures."""
    if who == "ours":
        return Ours(case.shape, case.pages, args.device)
    subject = Peer(case.shape, case.pages, args.device, args.route)
    if not pathlib.Path(str(subject.about["package"])).is_relative_to(args.peer):
        raise UnmeasuredError(f"{subject.about['package']} is not the package in {args.peer}")
    return subject


def measure(case: Case, subject: Subject, args: argparse.Namespace) -> Sample:
    """In this process."""
    bench = Bench(subject, args)
    case.measure(bench)
    return bench.sample


def child(case: Case, who: str, args: argparse.Namespace) -> None:
    """In a process of its own; one that hangs in its start or its end is ended."""
    faulthandler.dump_traceback_later(START_LIMIT_S, exit=True)
    try:
        subject = subject_of(case, who, args)
        faulthandler.cancel_dump_traceback_later()
        measure(case, subject, args)
        faulthandler.dump_traceback_later(END_LIMIT_S, exit=True)
        subject.close()
    except (Exception, SystemExit) as error:  # no traceback: what lies inside the peer is not looked at
        raise SystemExit(f"{type(error).__name__}: {error}") from None


# ---------------------------------------------------------------- processes


class Way(NamedTuple):
    """How a measuring process may be started; what fails is not tried again."""

    counting: bool
    route: str


class Runner:
    """Starts the measuring processes."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path) -> None:
        self._args = args
        self._ways: dict[tuple[str, str], list[Way]] = {}
        self._good: dict[str, Way] = {}
        self._calls = None if args.device == "cpu" else built_calls(folder)

    def sample(self, who: str, case: Case, limit_s: float) -> Sample | None:
        """One measurement, without figures or None where they cannot be had; why is printed."""
        ways = self._ways.setdefault((who, case.name), self._all_ways(who))
        end, sample = time.monotonic() + limit_s, None
        while ways and (left_s := end - time.monotonic()) > 0:
            way = ways[0]
            try:
                sample, trouble = self._child(who, case, way, left_s)
            except RuntimeError as error:
                print(f"FAILED {who} {case.name} {way}: {error}", flush=True)
                del ways[0]
                continue
            if trouble:
                print(f"{who} {case.name}: {trouble}", flush=True)
            if trouble and sample["running"]:
                sample["failed"][sample["running"]] = trouble.splitlines()[0]
            if sample["figures"]:
                self._good[who] = way
                if trouble and sample["running"]:
                    ways.clear()  # what killed it would do so again
                break
            print(f"FAILED {who} {case.name} {way}: {sample['failed']}", flush=True)
            del ways[0]
        return sample

    def _all_ways(self, who: str) -> list[Way]:
        routes = ROUTES if who == "peer" else ("-",)
        ways = [Way(counting, r) for r in routes for counting in ([True, False] if self._calls else [False])]
        return sorted(ways, key=lambda way: way != self._good.get(who))

    def _child(self, who: str, case: Case, way: Way, limit_s: float) -> tuple[Sample, str]:
        args = self._args
        if who == "peer":
            env = package.environment(args.peer)
            if way.route == "interfaces":  # those of its engines
                env["ENABLE_KVCACHED"] = "true"
        else:  # as an engine whose kernels leave holes alone, which those that people run do
            env = {"KVCACHED_UNBACKED": "hole", **os.environ}
            if args.device == "cpu":  # some pages of these small ones, as on a GPU
                env.setdefault("KVCACHED_MAX_RESERVED_MB", "1")
        if way.counting:
            package.preload(env, str(self._calls))
        command = [sys.executable, "-X", "faulthandler", "-m", "bench.alloc", "--child", who]
        command += ["--route", way.route, "--device", args.device, "--cases", case.name]
        command += ["--seconds", str(args.seconds), *(["--quick"] if args.quick else [])]
        command += ["--peer", args.peer] if who == "peer" else []
        sample, trouble = sample_of(command, env, limit_s=limit_s)
        sample["about"]["counting"] = way.counting
        return sample, trouble


class Run:
    """Everything measured so far, printed and kept as it comes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._out = args.out
        self.data: dict[str, Any] = {"machine": machine(), "device": args.device, "quick": args.quick}
        self.data |= {"rows": [], "about": []}

    def add(self, who: str, case: Case, round_number: int, sample: Sample) -> None:
        of = {"who": who, "case": case.name, "round": round_number}
        rows = [of | {"figure": key} | figure for key, figure in sample["figures"].items()]
        rows += [of | {"figure": key, "failed": why} for key, why in sample["failed"].items()]
        for row in rows:
            if "failed" in row:
                print(f"FAILED {who} {case.name} {row['figure']}: {row['failed']}", flush=True)
            print("RESULT " + json.dumps(row), flush=True)
        self.data["rows"] += rows
        self.data["about"].append(of | sample["about"])
        self.keep()

    def lost(self, who: str, case: Case, round_number: int) -> None:
        """A process that said nothing; why was printed."""
        row = {"who": who, "case": case.name, "round": round_number, "figure": "all"}
        row |= {"failed": "no process of it found anything, or one was stopped in an earlier round"}
        print("RESULT " + json.dumps(row), flush=True)
        self.data["rows"].append(row)
        self.keep()

    def keep(self) -> None:
        if self._out:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.data, indent=1) + "\n")


def measure_all(args: argparse.Namespace, run: Run) -> None:
    """Round by round, ours and the peer of a case after each other."""
    deadline = time.monotonic() + args.budget_s
    whos = ["ours", "peer"] if args.peer else ["ours"]
    plan = [(r, case, who) for r in range(args.rounds) for case in args.cases for who in whos]
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(args, pathlib.Path(folder))
        for step, (round_number, case, who) in enumerate(plan, 1):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                print(f"the time is over in round {round_number + 1} at {who} {case.name}", flush=True)
                return
            start = time.monotonic()
            sample = runner.sample(who, case, min(args.limit_s, left_s))
            if sample is None:
                run.lost(who, case, round_number)
            else:
                run.add(who, case, round_number, sample)
            took = time.monotonic() - start
            print(
                f"[{step}/{len(plan)}] {who} {case.name}, round {round_number + 1}: {took:.1f} s", flush=True
            )


# ---------------------------------------------------------------- tables


class Row(NamedTuple):
    """One line of the tables."""

    case: str
    figure: str
    title: str
    bar_us: float | None = None
    statistic: str = "median"


def rows_of_cycles() -> Iterator[Row]:
    bars = {"alloc-1": 1.0, "alloc-256": 10.0, "holes": 100.0}
    titles = {("sizes", f"alloc-{n}"): f"alloc({n:,}) + free" for n in SIZES}
    titles |= {("partial", f"partial-{n}"): f"alloc(1) + free, partial pages: {n:,}" for n in PARTIAL}
    titles[("holes", "holes")] = f"alloc({HOLE_BLOCKS}) + free over {HOLES:,} holes of one block"
    titles[("reserve", "reserve-page")] = "a page through the reserve, all its blocks"
    titles[("reserve", "reserve-one")] = "a page through the reserve, one block"
    for (case, figure), title in titles.items():
        for variant, words in VARIANTS.items():
            # Of lists; arrays are for many ids and have none.
            yield Row(case, figure + variant, title + words, None if variant else bars.get(figure))
        if figure == f"alloc-{SIZES[-1]}":
            yield Row("sizes", "available", "available_size()", 0.2)


CYCLES = list(rows_of_cycles())
FLAT = ("partial-1", "partial-1000", 1.5)
FREES = [
    Row(case, figure, f"{words}, {buffers} buffers", 20.0, "p99")
    for case, buffers in (("emptying", FEW_BUFFERS.buffers), ("emptying-64", MODEL.buffers))
    for figure, words in (("free", "as fast as it goes"), ("free-paced", "one every 100 us"))
]
Medians = dict[tuple[str, str, str], Sample]  # by who, case, figure


def medians(rows: Iterable[Sample]) -> Medians:
    """Over the rounds; a maximum stays one."""
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for row in rows:
        if "failed" not in row:
            groups.setdefault((row["who"], row["case"], row["figure"]), []).append(row)
    found: Medians = {}
    for key, group in groups.items():
        names = [name for name, value in group[0].items() if isinstance(value, (int, float))]
        found[key] = {name: statistics.median(row[name] for row in group if name in row) for name in names}
        found[key] |= {"max_us": max(row["max_us"] for row in group), "rounds": len(group)}
    return found


def microseconds(row: Sample | None) -> str:
    return " / ".join(number(row[f"{name}_us"]) for name in ("median", "p99", "max")) if row else "-"


def times(mine: Sample | None, theirs: Sample | None, statistic: str) -> str:
    if not mine or not theirs or not mine[f"{statistic}_us"]:
        return "-"
    return f"{number(theirs[f'{statistic}_us'] / mine[f'{statistic}_us'])}x"


def verdict(value: float | None, bar: float | None) -> str:
    if value is None or bar is None:
        return "-"
    return "pass" if value < bar else "**FAIL**"


def line(found: Medians, row: Row, *, bars: bool) -> list[str] | None:
    """Cells, None where nobody has the figure."""
    mine, theirs = (found.get((who, row.case, row.figure)) for who in ("ours", "peer"))
    if not mine and not theirs:
        return None
    bar = row.bar_us if bars else None
    shown = "-" if bar is None else f"< {bar:g}"
    value = mine[f"{row.statistic}_us"] if mine else None
    ratio = times(mine, theirs, row.statistic)
    return [row.title, microseconds(mine), microseconds(theirs), ratio, shown, verdict(value, bar)]


def flat_line(found: Medians) -> list[str] | None:
    """How much slower the first is made by more partial pages."""
    few, many, bar = FLAT
    shown: list[float | None] = []
    for who in ("ours", "peer"):
        pair = [found.get((who, "partial", figure)) for figure in (many, few)]
        shown.append(pair[0]["median_us"] / pair[1]["median_us"] if pair[0] and pair[1] else None)
    if shown == [None, None]:
        return None
    cells = ["-" if value is None else f"{value:.2f}" for value in shown]
    return ["the same, 1,000 against 1", *cells, "-", f"< {bar:g}", verdict(shown[0], bar)]


def went(row: Sample | None) -> str:
    if not row or "gone_after" not in row:
        return "-"
    return f"{row['gone_at_last_free']:.0f} / {row['gone_after']:.0f} of {row['pages']:.0f}"


def markdown(lines: list[list[str] | None]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in lines if cells]


def cycle_section(found: Medians) -> list[str]:
    lines = [line(found, row, bars=True) for row in CYCLES]
    after = max((at for at, row in enumerate(CYCLES) if row.case == "partial"), default=0)
    lines.insert(after + 1, flat_line(found))
    if not any(lines):
        return []
    head = [
        "Microseconds: median / p99 / max; the ratio is of medians, and so is the bar",
        "",
        "| what | ours | peer | peer / ours | bar | |",
        "|---|--:|--:|--:|--:|---|",
    ]
    return [*head, *markdown(lines), ""]


def free_section(found: Medians, *, on_gpu: bool) -> list[str]:
    lines: list[list[str] | None] = []
    for row in FREES:
        cells = line(found, row, bars=on_gpu)
        pages = [went(found.get((who, row.case, row.figure))) for who in ("ours", "peer")]
        lines.append([*cells, *pages] if cells else None)
    if not any(lines):
        return []
    head = [
        "A free that empties a page, page after page. Microseconds: median / p99 / max; the ratio is of p99, and so is the bar. Given "
        "back: pages of those freed, when the last free returned / once it was quiet",
        "",
        "| what | ours | peer | peer / ours | bar | | given back: ours | peer |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    return [*head, *markdown(lines), ""]


def notes(data: dict[str, Any], found: Medians) -> list[str]:
    """What did not work, where a driver call was seen, and what was run."""
    failed: dict[str, str] = {}
    for row in data["rows"]:
        if "failed" in row:
            failed.setdefault(f"{row['who']}, {row['case']}, {row['figure']}", row["failed"])
    lines = [f"* FAILED {where}: {' '.join(why.split())}" for where, why in failed.items()]
    driven = {key: row["driver_calls"] for key, row in found.items() if row.get("driver_calls")}
    shown = (f"{who} {figure} ({case}) {number(calls)}" for (who, case, figure), calls in driven.items())
    lines += [f"* Driver calls in one: {', '.join(shown)}"] if driven else []
    if not found:
        return lines
    counts = sorted({row["rounds"] for row in found.values()})
    rounds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    quick = ", --quick" if data["quick"] else ""
    return [*lines, f"{data['machine'] or data['device']}{quick}, medians of {rounds} rounds."]


def table(data: dict[str, Any]) -> str:
    """A run as Markdown."""
    found = medians(data["rows"])
    if not found:
        return "\n".join(["nothing was measured", *notes(data, found)])
    frees = free_section(found, on_gpu=data["device"] != "cpu")
    return "\n".join([*cycle_section(found), *frees, *notes(data, found)])


# ---------------------------------------------------------------- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda:0", "cpu"], default="cuda:0")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--seconds", type=float, help="for a figure; default 0.5, with --quick 0.02")
    parser.add_argument("--quick", action="store_true", help="to try it: short, and frees of 64 pages")
    parser.add_argument("--budget-s", type=float, default=86400, help="for all: no process runs beyond that")
    parser.add_argument("--limit-s", type=float, default=120, help="for a process")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names; default all")
    parser.add_argument("--peer", help="folder of the peer's package, built")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument(
        "--tables", type=pathlib.Path, metavar="FILE", help="show what --out wrote; measure nothing"
    )
    parser.add_argument("--child", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--route", default="-", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cases = [c for c in CASES if any(fnmatch.fnmatch(c.name, pattern) for pattern in args.cases)]
    if not args.cases:
        parser.error("no such case; there are " + " ".join(case.name for case in CASES))
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.seconds = args.seconds or (0.02 if args.quick else 0.5)
    if args.peer:
        args.peer = str(pathlib.Path(args.peer).resolve())
        if not (pathlib.Path(args.peer) / "kvcached").is_dir():
            parser.error(f"--peer {args.peer}: there is no package kvcached in it")
    return args


def check_device(device: str) -> None:
    """Without a look at the GPU itself: this process should take none of its memory."""
    try:
        from kvcached import _core
    except ImportError as error:
        raise SystemExit(f"kvcached is not here: {error}. Install it, or put it on PYTHONPATH") from error
    if device != "cpu" and (why := _core.backend_available(device)):
        raise SystemExit(f"{device} cannot be used ({why}); --device cpu measures on ordinary memory")


def main() -> None:
    args = arguments()
    if args.child:
        child(args.cases[0], args.child, args)
        return
    if args.tables:
        try:
            print(table(json.loads(args.tables.read_text())))
        except (OSError, ValueError, KeyError) as error:
            raise SystemExit(f"--tables {args.tables}: {error!r}") from error
        return
    check_device(args.device)
    run = Run(args)
    where = run.data["machine"] or args.device
    print(f"{where}: {args.rounds} rounds of {' '.join(case.name for case in args.cases)}", flush=True)
    try:
        measure_all(args, run)
    except KeyboardInterrupt:
        kept = f", kept in {args.out}" if args.out and run.data["rows"] else ""
        print(f"\ninterrupted after {len(run.data['rows'])} figures{kept}", flush=True)
        print(table(run.data))
        raise SystemExit(130) from None
    print(table(run.data))
    if not any("failed" not in row for row in run.data["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

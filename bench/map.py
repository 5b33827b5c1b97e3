"""Memory under a KV cache on one NVIDIA GPU: raw driver calls, kvcached and the peer in one run; the first tables of docs/FIGURES.md.

    python -m bench.map --peer /tmp/peer-src/kvcached-0.1.6 --out out/map.json
    python -m bench.map --device cpu --cases 'chunked-hole-*'     # ours only, on ordinary memory: no GPU needed

Per case (layout, what lies under unbacked pages, page size) it measures: to create the tensors of 32 layers' K and V over addresses for
the whole card (--whole-gib); to back --total-gib and to release it, one page a call and then all in one call; to shut down. `cached` is
`hole` with a cache of released handles that holds everything: to release is then to clear and to keep, and to back is to map again.

The floor is bench/floor.cu: the fewest driver calls that do the same, from C. The peer is the public package kvcached, used through its
`kvcached.vmm_ops` and otherwise a black box: what it backs is taken from the device's free memory, and times are compared per byte
backed. Driver calls of ours and of the peer are counted by bench/calls.c where that can be built, those of the floor by itself.

Every measurement is a process of its own, and each round runs floor, ours and peer of a case after each other, so that all meet the
same machine. A `RESULT {json}` line for each; medians over the rounds in the tables; every sample in --out.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bench import peer as peers
from bench.peer import PEER_PAGE_BYTES, call_any
from bench.processes import (
    ROOT,
    Sample,
    built,
    built_calls,
    counted_calls,
    last_words,
    machine,
    report,
    run,
    sample_of,
)
from bench.tables import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MIB, GIB = 1 << 20, 1 << 30
LAYERS, BUFFERS = 32, 64
BLOCK_BYTES = 32 << 10  # 16 tokens of 8 heads of 128, in 16 bits: the K or the V of one layer of an 8B model
PEER_LAYOUTS = {"chunked": "contiguous", "per-layer": "per layer"}
PROCESS_LIMIT_S = 60


class Case(NamedTuple):
    """One line of the tables."""

    layout: str
    unbacked: str  # hole, zero, or cached: hole, with a cache of released handles
    page_mib: int

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.unbacked}-{self.page_mib}"

    @property
    def width(self) -> int:
        """Handles of a page."""
        return BUFFERS if self.layout == "per-layer" else 1


# Per layer, 2 MiB in each buffer are a page of 128 MiB. The slowest come last, for --budget-s.
CASES = [
    Case("chunked", "hole", 16),
    Case("per-layer", "hole", 128),
    *(Case("chunked", "hole", mib) for mib in (2, 32, 128)),
    *(Case("chunked", "cached", mib) for mib in (16, 32, 128)),
    *(Case("chunked", "zero", mib) for mib in (16, 32, 128)),
    Case("per-layer", "zero", 128),
    Case("chunked", "cached", 2),
    Case("chunked", "zero", 2),
]
BESIDE_PEER = {"chunked-hole-16", "per-layer-hole-128"}
ORDER = {"chunked": 0, "per-layer": 1, "hole": 0, "zero": 1, "cached": 2}


class Meter:
    """Microseconds, and driver calls where they are counted, of what it is given to do."""

    def __init__(self) -> None:
        self.sample: Sample = {}
        self._count = counted_calls()

    def time(self, name: str, work: Callable[[], object]) -> None:
        """Do it once."""
        before = self._count() if self._count else 0
        start = time.perf_counter()
        work()
        self.sample[f"{name}_us"] = (time.perf_counter() - start) * 1e6
        # None at all were taken in a way that is not seen.
        if self._count and (calls := self._count() - before):
            self.sample[f"{name}_calls"] = calls


class Memory(Protocol):
    """What is measured, once it has its tensors."""

    def map(self, units: list[int]) -> object:
        """Back these."""

    def unmap(self, units: list[int]) -> object:
        """Release these."""

    def synchronise(self) -> None:
        """Wait for the device."""

    def device_bytes(self) -> int:
        """Memory in use since the tensors were created, as the device says."""


def passes(memory: Memory, units: list[int], meter: Meter, *, first: bool) -> None:
    """Back all and release all, one a call and in one call; `first`: once more before, from an empty handle cache."""

    def back() -> None:
        for unit in units:
            memory.map([unit])
        memory.synchronise()

    def release() -> None:
        for unit in units:
            memory.unmap([unit])

    def back_one_call() -> None:
        memory.map(units)
        memory.synchronise()

    if first:
        meter.time("first_back", back)
        meter.time("first_release", release)
    meter.time("back", back)
    meter.sample["device_bytes"] = memory.device_bytes()
    meter.time("release", release)
    meter.sample["kept_bytes"] = memory.device_bytes()
    meter.time("back_one_call", back_one_call)
    meter.time("release_one_call", lambda: memory.unmap(units))
    meter.sample["units"] = len(units)


def check_backed(sample: Sample) -> None:
    """Times of memory that is not there are worth nothing."""
    backed, seen = sample["backed_bytes"], sample["device_bytes"]
    if not 0.98 * backed <= seen <= 1.1 * backed + 64 * MIB:
        raise SystemExit(f"{backed / MIB:,.0f} MiB were backed, the device says {seen / MIB:,.0f}")


class Ours:
    """kvcached's `FTensor`."""

    def __init__(self, case: Case, args: argparse.Namespace, meter: Meter) -> None:
        from kvcached import _core

        page_bytes = case.page_mib * MIB
        granularity = _core.granularity(args.device)  # opens the device
        geometry = _core.Geometry.solve(
            BUFFERS, BLOCK_BYTES, granularity, page_bytes=page_bytes, layout=case.layout
        )
        num_blocks = args.whole_bytes // (BUFFERS * BLOCK_BYTES)
        unbacked = "zero" if case.unbacked == "zero" else "hole"
        cache_bytes = args.total_bytes if case.unbacked == "cached" else 0
        self.core = _core
        self._device = args.device

        def create() -> None:
            self.tensor = _core.FTensor(
                args.device, geometry, num_blocks, unbacked=unbacked, cache_bytes=cache_bytes
            )
            self.buffers = self.tensor.buffers()

        meter.time("create", create)
        assert len(self.buffers) == BUFFERS
        self.map, self.unmap, self.synchronise = self.tensor.map, self.tensor.unmap, self.tensor.synchronise
        self.map([0])  # the driver sets itself up on the first call of each kind; the floor does the same
        if self.tensor.mapped_bytes != page_bytes:
            raise SystemExit(
                f"a page is {self.tensor.mapped_bytes} bytes, not {page_bytes}: {geometry.explain()}"
            )
        self.unmap([0])
        self._free = self.core.mem_info(self._device)[0] + self.tensor.cached_bytes

    def device_bytes(self) -> int:
        if self._device == "cpu":  # other processes use the same memory
            return self.tensor.mapped_bytes + self.tensor.cached_bytes
        return self._free - self.core.mem_info(self._device)[0]

    def close(self) -> None:
        """All of it: no name here keeps the range alive."""
        del self.map, self.unmap, self.synchronise, self.buffers, self.tensor


def ours(case: Case, args: argparse.Namespace) -> Sample:
    """One sample of ours."""
    meter = Meter()
    memory = Ours(case, args, meter)
    units = list(range(args.total_bytes // (case.page_mib * MIB)))
    passes(memory, units, meter, first=case.unbacked == "cached")
    meter.time("shutdown", memory.close)
    if memory.core.live_ranges():
        raise SystemExit("the range outlived its tensors: its shutdown was not measured")
    meter.sample["backed_bytes"] = len(units) * case.page_mib * MIB
    check_backed(meter.sample)
    return meter.sample


class Peer:
    """The public package, by the functions that it documents."""

    def __init__(self, case: Case, args: argparse.Namespace, meter: Meter) -> None:
        import torch

        from kvcached import vmm_ops

        device, contiguous = args.device, case.layout == "chunked"
        torch.zeros(1, device=device)  # torch and the driver are up before anything is timed
        torch.cuda.synchronize()
        self._torch, self._ops = torch, vmm_ops
        size = args.whole_bytes // LAYERS

        def create() -> None:
            self.tensors = peers.create(vmm_ops, device, size, LAYERS)

        meter.time("init", lambda: peers.init(vmm_ops, device, contiguous=contiguous))
        meter.time("create", create)
        shown = (f"{tuple(getattr(t, 'shape', ()))} {getattr(t, 'dtype', '')}" for t in self.tensors)
        meter.sample["tensors"] = dict(collections.Counter(shown))
        # Twice: the first one also sets the driver up. A peer that kept the memory takes none the second time.
        took = []
        for _ in range(2):
            self._free = torch.cuda.mem_get_info()[0]
            self.map([0])
            self.synchronise()
            took.append(round(self.device_bytes() / PEER_PAGE_BYTES) * PEER_PAGE_BYTES)
            self.unmap([0])
        self.unit_bytes = took[1] or took[0]
        self._free += 0 if took[1] else took[0]
        if not self.unit_bytes:
            raise SystemExit("mapping offset 0 took no memory of the device")

    def map(self, units: list[int]) -> object:
        return call_any(self._ops.map_to_kv_tensors, ((units,), {}), ((units, 0), {}))

    def unmap(self, units: list[int]) -> object:
        return call_any(self._ops.unmap_from_kv_tensors, ((units,), {}), ((units, 0), {}))

    def synchronise(self) -> None:
        self._torch.cuda.synchronize()

    def device_bytes(self) -> int:
        return self._free - self._torch.cuda.mem_get_info()[0]

    def close(self) -> None:
        """As its own engines end."""
        del self.tensors
        self._ops.shutdown_kvcached()


def peer(case: Case, args: argparse.Namespace) -> Sample:
    """One sample of the peer. `--stride`: whether offsets count a buffer's bytes or those of all buffers."""
    meter = Meter()
    memory = Peer(case, args, meter)
    stride = memory.unit_bytes if args.stride == "all" else PEER_PAGE_BYTES
    count = max(1, args.total_bytes // memory.unit_bytes)
    passes(memory, [unit * stride for unit in range(count)], meter, first=False)
    meter.sample |= {"stride_bytes": stride, "backed_bytes": count * memory.unit_bytes}
    check_backed(meter.sample)
    report(meter.sample)  # a shutdown that dies costs its own figure only
    meter.time("shutdown", memory.close)
    return meter.sample


class Way(NamedTuple):
    """How a measuring process may be started; what fails is not tried again."""

    counting: bool
    stride: str


class Runner:
    """Starts the measuring processes."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path) -> None:
        self._args = args
        self._ways: dict[tuple[str, str], list[Way]] = {}
        self._floor = self._calls = None
        if args.device == "cpu":
            return
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        self._floor = built(folder / "floor", [nvcc, "-O2", ROOT / "bench" / "floor.cu", "-lcuda"])
        self._calls = built_calls(folder)

    def whos(self, case: Case) -> list[str]:
        """Whom this case measures."""
        there = {"floor": self._floor, "ours": True, "peer": self._args.peer and case.name in BESIDE_PEER}
        return [who for who, is_there in there.items() if is_there]

    def sample(self, who: str, case: Case) -> Sample | None:
        """One measurement, None where it cannot be had; why is printed."""
        if who == "floor":
            return self._floor_sample(case)
        ways = self._ways.setdefault((who, case.name), self._all_ways(who, case))
        while ways:
            try:
                return self._child(who, case, ways[0])
            except RuntimeError as error:
                print(f"FAILED {who} {case.name} {ways[0]}: {error}", flush=True)
                del ways[0]
        return None

    def _all_ways(self, who: str, case: Case) -> list[Way]:
        counting = [True, False] if self._calls else [False]
        strides = ["all", "buffer"]
        if who == "ours":
            strides = ["-"]
        elif case.layout == "per-layer":
            strides.reverse()
        return [Way(count, stride) for stride in strides for count in counting]

    def _floor_sample(self, case: Case) -> Sample | None:
        args, handle_mib = self._args, case.page_mib // case.width
        sizes = [case.width, handle_mib, args.total_bytes // MIB, args.whole_bytes // MIB]
        ended = run([str(self._floor), case.unbacked, *map(str, sizes)], limit_s=PROCESS_LIMIT_S)
        if ended.trouble:
            print(f"FAILED floor {case.name}: {ended.trouble}\n{last_words(ended.err)}", flush=True)
            return None
        return json.loads(ended.out)

    def _child(self, who: str, case: Case, way: Way) -> Sample:
        args = self._args
        env = peers.environment(args.peer) if who == "peer" else dict(os.environ)
        if way.counting:
            peers.preload(env, str(self._calls))
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "bench.map",
            "--child",
            who,
            "--stride",
            way.stride,
        ]
        command += ["--device", args.device, "--cases", case.name]
        command += ["--total-gib", str(args.total_bytes / GIB), "--whole-gib", str(args.whole_bytes / GIB)]
        sample, trouble = sample_of(command, env, limit_s=PROCESS_LIMIT_S)
        if trouble:  # it died in its shutdown
            print(f"{who} {case.name}: {trouble}", flush=True)
        return sample


Rows = dict[tuple[Case, str], Sample]  # medians over the rounds


def medians(samples: Iterable[Sample]) -> Rows:
    """One row for each case and measured thing, in the tables' order."""
    groups: dict[tuple[Case, str], list[Sample]] = {}
    for sample in samples:
        case = Case(sample["layout"], sample["unbacked"], sample["page_mib"])
        groups.setdefault((case, sample["who"]), []).append(sample)
    rows: Rows = {}
    for key in sorted(
        groups, key=lambda key: (ORDER[key[0].layout], ORDER[key[0].unbacked], key[0].page_mib)
    ):
        group = groups[key]
        names = [name for name, value in group[0].items() if isinstance(value, (int, float))]
        rows[key] = {name: statistics.median(s[name] for s in group if name in s) for name in names}
        rows[key]["rounds"] = len(group)
    return rows


def milliseconds(row: Sample | None, key: str) -> str:
    return number(row[f"{key}_us"] / 1e3) if row and f"{key}_us" in row else "-"


def calls(row: Sample | None, key: str, *, per_unit: bool) -> str:
    """Driver calls; of one page where `per_unit`."""
    found = row.get(f"{key}_calls") if row else None
    if row is None or found is None:
        return "-"
    return number(found / row["units"] if per_unit else found)


def ratio(row: Sample | None, to: Sample | None, key: str, *, per_byte: bool) -> str:
    """Of their times; of those for one backed byte where `per_byte`."""
    if not row or not to or f"{key}_us" not in row or not to.get(f"{key}_us"):
        return "-"
    scale = to["backed_bytes"] / row["backed_bytes"] if per_byte else 1.0
    value = row[f"{key}_us"] / to[f"{key}_us"] * scale
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def figures(rows: Rows, case: Case, key: str, *, backing: bool) -> list[str]:
    """Of one case and one key: times and ratios; while backing a byte for the ratios, a page for the calls."""
    floor, mine = rows.get((case, "floor")), rows.get((case, "ours"))
    peers = {peer.layout: row for (peer, who), row in rows.items() if who == "peer"}
    others = [floor, *(peers.get(layout) for layout in PEER_LAYOUTS)]
    ratios = [ratio(mine, other, key, per_byte=backing) for other in others]
    times, counts = (
        [f(row, key) for row in (floor, mine)] for f in (milliseconds, partial(calls, per_unit=backing))
    )
    return [*times, *ratios, *counts]


def section(rows: Rows, title: str, keys: tuple[str, ...], *, backing: bool) -> list[str]:
    """A line for each case; every cell has one figure for each key."""
    names = " / ".join(key.removesuffix("_one_call") for key in keys)
    scope = ", a page" if backing else ""
    lines = [
        f"{title}: {names}",
        "",
        "| layout | unbacked | page, MiB | floor, ms | ours, ms | ours / floor | ours / peer, contiguous "
        f"| ours / peer, per layer | driver calls{scope}: floor | ours |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for case in dict.fromkeys(case for case, _ in rows):
        of_keys = [figures(rows, case, key, backing=backing) for key in keys]
        cells = [" / ".join(cell) if set(cell) != {"-"} else "-" for cell in zip(*of_keys, strict=True)]
        lines.append(f"| {case.layout} | {case.unbacked} | {case.page_mib} | {' | '.join(cells)} |")
    return [*lines, ""]


def peer_section(rows: Rows) -> list[str]:
    """What the peer itself took."""
    found = {case.layout: row for (case, who), row in rows.items() if who == "peer"}
    if not found:
        return []
    back, once, ends = ("back", "release"), ("back_one_call", "release_one_call"), ("create", "shutdown")
    lines = [
        "The peer: back / release, create / shutdown",
        "",
        "| layout | MiB backed by an offset | backed, GiB | ms, an offset a call | ms, one call | ms, create / shutdown "
        "| driver calls an offset | create / shutdown | kept after release, MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for layout, row in found.items():
        times = [" / ".join(milliseconds(row, key) for key in keys) for keys in (back, once, ends)]
        counts = [
            " / ".join(calls(row, key, per_unit=per) for key in keys)
            for keys, per in ((back, True), (ends, False))
        ]
        backed = row["backed_bytes"]
        sizes = f"{number(backed / row['units'] / MIB)} | {number(backed / GIB)}"
        kept = number(row["kept_bytes"] / MIB)
        lines.append(f"| {PEER_LAYOUTS[layout]} | {sizes} | {' | '.join([*times, *counts])} | {kept} |")
    return [*lines, ""]


def cache_section(rows: Rows) -> list[str]:
    """Whether a cache of released handles pays."""
    sums = {key: row | {"sum_us": row["back_us"] + row["release_us"]} for key, row in rows.items()}
    lines = [
        "A cache of released handles against none, back / release / their sum, a page a call: below 1 it pays",
        "",
        "| page, MiB | floor | ours |",
        "|--:|--:|--:|",
    ]
    cached = [case for case in dict.fromkeys(case for case, _ in rows) if case.unbacked == "cached"]
    for case in cached:
        pairs = [
            (sums.get((case, who)), sums.get((case._replace(unbacked="hole"), who)))
            for who in ("floor", "ours")
        ]
        shown = [
            " / ".join(ratio(*pair, key, per_byte=True) for key in ("back", "release", "sum"))
            for pair in pairs
        ]
        lines.append(f"| {case.page_mib} | {' | '.join(shown)} |")
    return [*lines, ""] if cached else []


def table(samples: Iterable[Sample]) -> str:
    """The samples of a run as Markdown."""
    rows = medians(samples)
    if not rows:
        return "nothing was measured"
    counts = sorted({row["rounds"] for row in rows.values()})
    backed = max(row["backed_bytes"] for row in rows.values()) / GIB
    lines = [
        *section(rows, "A page a call", ("back", "release"), backing=True),
        *section(rows, "All in one call", ("back_one_call", "release_one_call"), backing=True),
        *section(rows, "The tensors of the whole card", ("create", "shutdown"), backing=False),
        *peer_section(rows),
        *cache_section(rows),
    ]
    rounds = " to ".join(str(count) for count in (counts[0], counts[-1])[: len(counts)])
    return "\n".join([*lines, f"{backed:g} GiB backed, medians of {rounds} rounds."])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda:0", "cpu"], default="cuda:0")
    parser.add_argument("--total-gib", type=float, help="to back; default 32, on a CPU 1")
    parser.add_argument("--whole-gib", type=float, help="addresses to reserve; default 128, on a CPU 8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=86400, help="no process is started after that")
    parser.add_argument(
        "--cases", nargs="+", default=["*"], help="patterns of LAYOUT-UNBACKED-PAGE_MIB; default all"
    )
    parser.add_argument("--peer", help="folder of the peer's package, built")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--child", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--stride", default="-", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cases = [c for c in CASES if any(fnmatch.fnmatch(c.name, pattern) for pattern in args.cases)]
    if not args.cases:
        parser.error("no such case; there are " + " ".join(case.name for case in CASES))
    cpu = args.device == "cpu"
    args.peer = str(pathlib.Path(args.peer).resolve()) if args.peer and not cpu else None
    args.total_bytes = int((args.total_gib or (1 if cpu else 32)) * GIB)
    args.whole_bytes = int((args.whole_gib or (8 if cpu else 128)) * GIB)
    if args.total_bytes > args.whole_bytes or (args.total_bytes | args.whole_bytes) % (128 * MIB):
        parser.error("--total-gib and --whole-gib: whole pages of 128 MiB, and no more backed than reserved")
    return args


def measure_all(args: argparse.Namespace) -> list[Sample]:
    """All samples, printed and kept as they come."""
    deadline = time.monotonic() + args.budget_s
    samples: list[Sample] = []
    about = {"machine": machine(), "total_gib": args.total_bytes / GIB, "whole_gib": args.whole_bytes / GIB}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(args, pathlib.Path(folder))
        plan = [
            (r, case, who) for r in range(args.rounds) for case in args.cases for who in runner.whos(case)
        ]
        for round_number, case, who in plan:
            start = time.monotonic()
            if start > deadline:
                print(f"the time is over in round {round_number + 1} at {who} {case.name}", flush=True)
                break
            found = runner.sample(who, case)
            if found is None:
                continue
            sample = {"who": who, "round": round_number, **case._asdict()}
            sample |= {key: round(v, 1) if isinstance(v, float) else v for key, v in found.items()}
            sample["process_s"] = round(time.monotonic() - start, 1)
            samples.append(sample)
            print("RESULT " + json.dumps(sample), flush=True)
            if args.out:
                args.out.write_text(json.dumps({**about, "samples": samples}, indent=1))
    return samples


def main() -> None:
    args = arguments()
    if args.child:
        report({"ours": ours, "peer": peer}[args.child](args.cases[0], args))
        return
    print(f"{machine() or args.device}: {args.rounds} rounds of {len(args.cases)} cases", flush=True)
    print(table(measure_all(args)))


if __name__ == "__main__":
    main()

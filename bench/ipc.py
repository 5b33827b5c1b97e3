"""What agreeing costs: maps and two-phase unmaps over several worker processes, beside the slowest rank's own work.

    python -m bench.ipc --out out/ipc.json
    python -m bench.ipc --device cuda --ranks 1 2 4 8       # a GPU each; --one-gpu: all on the first

Each rank is a process of its own with the tensors of an 8B model's KV cache, a group of 64 buffers in pages of 16 MiB; this process
coordinates them over sockets, as an engine's scheduler does. Per number of ranks and of pages: a map, an unmap (PREPARE and COMMIT over
several ranks, one exchange over one), and an exchange in which nothing is done (`wait`: every rank synchronises its device).

`own` is the driver work of the rank that took longest in that very call, as its server timed it; `over` is what the call took beyond that,
which is the price of agreeing: frames, threads that wake, and ranks that have to wait for a core, of which this machine may have fewer than
there are ranks. Medians and 99th percentiles of single calls. Frees of an unmap's two steps count as one call, `over` for both exchanges.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.alloc import no_collection, percentile
from bench.processes import ROOT, Sample, end_group, machine
from bench.tables import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUFFERS, BLOCK_BYTES, PAGE_BYTES, PAGES = 64, 32 << 10, 16 << 20, 64
START_LIMIT_S = 120
WARM_CALLS = 20
#: A server keeps the times of 4096 pieces of work, three of which are a map and an unmap.
CALLS_AT_ONCE = 1000
ALONE_S = 3

# What a rank does in one call, by the figure's name.
WORK = {
    "map": [["map"]],
    "unmap": [["unmap"], ["prepare", "commit"]],  # over one rank, over several
    "wait": [["synchronise"]],
}


# ---------------------------------------------------------------- a rank


def serve(device: str, rank: int, busy_ms: float) -> None:
    """A worker: says where it listens, then its times whenever it is asked."""
    from kvcached._core import FTensor, Geometry, RankServer, granularity

    geometry = Geometry.solve(BUFFERS, BLOCK_BYTES, granularity(device), page_bytes=PAGE_BYTES)
    server = RankServer(rank=rank)
    server.add_group(FTensor(device, geometry, PAGES * geometry.blocks_per_page))
    batches = Batches(device, busy_ms) if busy_ms else None
    print(server.address, flush=True)
    for _ in sys.stdin:
        print(json.dumps([server.take_times(), batches.ended if batches else 0]), flush=True)
    server.stop()


class Batches(threading.Thread):
    """GPU work as an engine with asynchronous scheduling submits it: while one batch runs, the next is queued."""

    def __init__(self, device: str, batch_ms: float) -> None:
        import torch

        super().__init__(daemon=True)
        self.ended = 0
        self._torch, self._device = torch, device
        self._matrix = torch.rand(4096, 4096, device=device, dtype=torch.bfloat16)
        self._products = 1
        self._batch()  # the library's own start
        self._products = 100
        begin = time.perf_counter()
        self._batch().synchronize()
        self._products = max(1, round(100 * batch_ms / 1e3 / (time.perf_counter() - begin)))
        self.start()

    def _batch(self) -> Any:
        for _ in range(self._products):
            self._matrix @ self._matrix
        event = self._torch.cuda.Event()
        event.record()
        return event

    def run(self) -> None:
        self._torch.cuda.set_device(self._device)
        queued = self._batch()
        while True:
            running, queued = queued, self._batch()
            running.synchronize()
            self.ended += 1


class Rank:
    """The process of one."""

    def __init__(self, device: str, rank: int, busy_ms: float) -> None:
        command = [sys.executable, "-m", "bench.ipc", "--device", device, "--serve", str(rank)]
        command += ["--busy-ms", str(busy_ms)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.number = rank

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"rank {self.number} ended: exit {self._process.wait(START_LIMIT_S)}")
        return line.strip()

    def times(self) -> tuple[list[tuple[str, float]], int]:
        """What its server's work took since it was last asked, and the batches that have ended so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("times\n")
        self._process.stdin.flush()
        times, batches = json.loads(self.hear())
        return times, batches

    def end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        end_group(self._process)


@contextlib.contextmanager
def started(devices: list[str], busy_ms: float) -> Iterator[tuple[list[Rank], Any]]:
    """Ranks, and the coordinator's end of them."""
    from kvcached._core import Ranks

    processes = [Rank(device, number, busy_ms) for number, device in enumerate(devices)]
    ranks = None
    try:
        ranks = Ranks([(0, rank.number, rank.hear()) for rank in processes])
        yield processes, ranks
    finally:
        if ranks is not None:
            ranks.close()
        for rank in processes:
            rank.end()


# ---------------------------------------------------------------- what is timed


class Call(NamedTuple):
    """One call: how long it took, and the driver work of the rank that took longest, both in microseconds."""

    took: float
    own: float

    @property
    def over(self) -> float:
        return self.took - self.own


def own_work(figure: str, of_ranks: list[list[tuple[str, float]]]) -> list[float]:
    """Microseconds of the slowest rank, call by call: in each step of a call that of the rank that was slowest in it."""
    steps = next(steps for steps in WORK[figure] if any(word in steps for word, _ in of_ranks[0]))
    found: list[list[float]] = []
    for step in steps:
        each = [[seconds * 1e6 for word, seconds in times if word == step] for times in of_ranks]
        found.append([max(together) for together in zip(*each, strict=True)])
    return [sum(together) for together in zip(*found, strict=True)]


def cycle(ranks: Any, pages: int) -> dict[str, Callable[[], object]]:
    """What is called one after the other, by the figure's name."""
    chosen = list(range(1, 1 + pages))
    return {
        "map": lambda: ranks.map(chosen),
        "unmap": lambda: ranks.unmap(chosen),
        "wait": ranks.synchronise,
    }


def measured(processes: list[Rank], ranks: Any, pages: int, calls: int) -> dict[str, list[Call]]:
    figures = cycle(ranks, pages)
    found: dict[str, list[Call]] = {figure: [] for figure in figures}
    left, warm = calls, True
    while left:
        at_once = min(left, CALLS_AT_ONCE) if not warm else min(left, WARM_CALLS)
        took: dict[str, list[float]] = {figure: [] for figure in figures}
        with no_collection():
            for _ in range(at_once):
                for figure, call in figures.items():
                    begin = time.perf_counter_ns()
                    call()
                    took[figure].append((time.perf_counter_ns() - begin) / 1e3)
        times = [rank.times()[0] for rank in processes]
        if warm:
            warm = False
            continue
        for figure, own in ((figure, own_work(figure, times)) for figure in figures):
            found[figure] += [Call(*pair) for pair in zip(took[figure], own, strict=True)]
        left -= at_once
    return found


class Pace:
    """Batches a second of the first rank since this was made."""

    def __init__(self, processes: list[Rank]) -> None:
        self._first = processes[0]
        self._batches, self._begin = self._first.times()[1], time.perf_counter()

    def so_far(self) -> float:
        seconds = time.perf_counter() - self._begin
        return (self._first.times()[1] - self._batches) / seconds


def pace_alone(processes: list[Rank]) -> float:
    """While nothing is mapped or unmapped."""
    pace = Pace(processes)
    time.sleep(ALONE_S)
    return pace.so_far()


def summary(calls: list[Call]) -> Sample:
    sample: Sample = {"calls": len(calls)}
    for name in ("took", "own", "over"):
        ordered = sorted(getattr(call, name) for call in calls)
        sample[f"{name}_us"] = round(statistics.median(ordered), 2)
        sample[f"{name}_p99_us"] = round(percentile(ordered, 0.99), 2)
    return sample


# ---------------------------------------------------------------- what is shown


def table(data: dict[str, Any]) -> str:
    lines = [
        "| ranks | pages | call | median us | p99 us | slowest rank's own, median us | beyond that, median us | p99 us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        cells = [row["ranks"], row["pages"], row["figure"]]
        figures = ("took_us", "took_p99_us", "own_us", "over_us", "over_p99_us")
        lines.append(
            "| " + " | ".join(map(str, [*cells, *(number(row[figure]) for figure in figures)])) + " |"
        )
    if data["busy_ms"]:
        share = min(row["of_undisturbed"] for row in data["rows"])
        lines.append(f"\nGPU batches of {data['busy_ms']} ms all the while; at least {share} of undisturbed.")
    where = data["machine"] or f"{data['device']}, {data['cores']} cores"
    lines.append(f"\n{where}; {data['calls']} calls of each.")
    return "\n".join(lines)


# ---------------------------------------------------------------- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU for each rank")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--calls", type=int, default=2000, help="of each kind")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--busy-ms", type=float, default=0, help="GPU batches of so long run all the while")
    args = parser.parse_args()
    if min([*args.ranks, *args.pages, args.calls]) < 1 or max(args.pages) >= PAGES:
        parser.error(f"at least one rank, page and call, and fewer than {PAGES} pages")
    return args


def devices(args: argparse.Namespace, ranks: int) -> list[str]:
    if args.device != "cuda":
        return [args.device] * ranks
    return [f"cuda:{0 if args.one_gpu else rank}" for rank in range(ranks)]


def main() -> None:
    args = arguments()
    if args.serve is not None:
        serve(args.device, args.serve, args.busy_ms)
        return
    data: dict[str, Any] = {
        "device": args.device,
        "one_gpu": args.one_gpu,
        "machine": machine() if args.device != "cpu" else "",
        "cores": len(os.sched_getaffinity(0)),
        "calls": args.calls,
        "busy_ms": args.busy_ms,
        "rows": [],
    }
    for count in args.ranks:
        with started(devices(args, count), args.busy_ms) as (processes, ranks):
            undisturbed = pace_alone(processes) if args.busy_ms else 0
            for pages in args.pages:
                pace = Pace(processes)
                found = measured(processes, ranks, pages, args.calls)
                rate = pace.so_far()
                for figure, calls in found.items():
                    row: Sample = {"ranks": count, "pages": pages, "figure": figure} | summary(calls)
                    if undisturbed:
                        share = round(rate / undisturbed, 4)
                        row |= {"batches_per_s": round(rate, 2), "of_undisturbed": share}
                    data["rows"].append(row)
                    print("RESULT " + json.dumps(row), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(data, indent=1) + "\n")
    print(table(data))


if __name__ == "__main__":
    main()

"""Backing memory page by page through kvcached against the raw driver calls for the same handles, in one run.

    python bench/backing.py --out backing.json          # on a machine with an NVIDIA GPU and nvcc

Each round runs the floor (bench/floor.cu, a process of its own) and then ours (a process of its own too), so that both meet
the same machine. The table gives medians over the rounds and the ratio ours / floor.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20


def ours(page_mib: int, total_mib: int) -> dict[str, float]:
    """Microseconds to back and to release `total_mib` in pages of `page_mib`, one call a page and one call for all."""
    from kvcached import _core

    layers = 32
    block = page_mib * MIB // layers // 8
    geometry = _core.Geometry.solve(layers, block, _core.granularity("cuda:0"), page_bytes=page_mib * MIB)
    assert geometry.page_bytes == page_mib * MIB, geometry.explain()
    pages = total_mib // page_mib
    start = time.perf_counter()
    ftensor = _core.FTensor("cuda:0", geometry, pages * geometry.blocks_per_page)
    buffers = ftensor.buffers()
    create_us = (time.perf_counter() - start) * 1e6
    assert len(buffers) == layers
    result = {"create_tensors_us": create_us}
    ftensor.map([0])  # the driver sets itself up on the first call of each kind; the floor does the same
    ftensor.unmap([0])
    start = time.perf_counter()
    for page in range(pages):
        ftensor.map([page])
    result["back_us"] = (time.perf_counter() - start) * 1e6
    start = time.perf_counter()
    for page in range(pages):
        ftensor.unmap([page])
    result["release_us"] = (time.perf_counter() - start) * 1e6
    everything = list(range(pages))
    start = time.perf_counter()
    ftensor.map(everything)
    result["back_one_call_us"] = (time.perf_counter() - start) * 1e6
    start = time.perf_counter()
    ftensor.unmap(everything)
    result["release_one_call_us"] = (time.perf_counter() - start) * 1e6
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total-mib", type=int, default=8192)
    parser.add_argument("--page-mib", type=int, nargs="+", default=[2, 16, 32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--ours", type=int, help=argparse.SUPPRESS)  # one measurement of ours, in a child
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(ours(args.ours, args.total_mib)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        floor = pathlib.Path(folder) / "floor"
        subprocess.run(["nvcc", "-O2", "-o", floor, HERE / "floor.cu", "-lcuda"], check=True)
        for page_mib in args.page_mib:
            floors, mine = [], []
            for _ in range(args.rounds):
                done = subprocess.run(
                    [floor, str(page_mib), str(args.total_mib)], check=True, capture_output=True, text=True
                )
                floors.append([float(x) for x in done.stdout.split()])
                command = [
                    sys.executable,
                    __file__,
                    "--ours",
                    str(page_mib),
                    "--total-mib",
                    str(args.total_mib),
                ]
                mine.append(
                    json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                )
            row = {"page_mib": page_mib, "total_mib": args.total_mib, "rounds": args.rounds}
            row["floor_back_us"] = statistics.median(f[0] for f in floors)
            row["floor_release_us"] = statistics.median(f[1] for f in floors)
            row |= {key: statistics.median(m[key] for m in mine) for key in mine[0]}
            row["back_ratio"] = row["back_us"] / row["floor_back_us"]
            row["release_ratio"] = row["release_us"] / row["floor_release_us"]
            row["back_one_call_ratio"] = row["back_one_call_us"] / row["floor_back_us"]
            rows.append(row)
            print("RESULT " + json.dumps({k: round(v, 3) for k, v in row.items()}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""vLLM on a GPU, natively and with kvcached, in one run: the tables of docs/FIGURES.md.

    python bench/vllm_matrix.py tokens --engines 0.26.0-v1 0.26.0-v2 0.29.0 --out out/tokens.json
    python bench/vllm_matrix.py speed --engines 0.26.0-v1 0.26.0-v2 0.29.0 --out out/speed.json -- --size 8b --dummy

`tokens`: every engine natively twice, with kvcached, and with kvcached handing out the highest pages of a whole-card id space
first; prefix caching off and on; all at once, for tokens do not depend on time (VLLM_ENABLE_V1_MULTIPROCESSING=0). Digests are
compared pass by pass, and only where native equals itself. `speed`: one engine at a time, natively and with kvcached.
Every engine is a process of its own (bench/vllm_run.py). Its name says what the process needs: `--site NAME=FOLDER` puts a
folder of packages before all others for the engines whose name starts with NAME (a machine without a network); without it
the installed vLLM is used. The peer's runs (`--runs peer`) take `--peer FOLDER` in place of ours.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}
KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_STRICT": "1"}
Run = list[dict[str, Any]]


Results = dict[tuple[str, str], dict[str, Run]]


class Plan(NamedTuple):
    """How one run of an engine differs from the others: environment, and options by mode."""

    env: dict[str, str]
    options: dict[str, tuple[str, ...]]


SMALL, WHOLE_CARD = ("--kv-gib", "4"), ("--kv-gib", "120")
PLANS = {
    "native": Plan({}, {"tokens": SMALL, "speed": ()}),
    "native2": Plan({}, {"tokens": SMALL, "speed": ()}),
    "ours": Plan(KVCACHED, {"tokens": SMALL, "speed": ("--kvctl",)}),
    "top": Plan(
        {**KVCACHED, "KVCACHED_PAGE_ORDER": "highest"},
        {"tokens": WHOLE_CARD, "speed": ("--utilization", "0.9")},
    ),
    "peer": Plan({"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}, {"tokens": SMALL, "speed": ()}),
}
RUNS = {"tokens": ["native", "native2", "ours", "top"], "speed": ["native", "ours"]}


def environment(engine: str, name: str, args: argparse.Namespace) -> dict[str, str]:
    env = {**os.environ, **COMMON, **PLANS[name].env}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [args.peer] if name == "peer" else [env.get("PYTHONPATH")]
    paths += [folder for site, folder in args.sites.items() if engine.startswith(site)]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if engine.endswith(("-v1", "-v2")):
        env["VLLM_USE_V2_MODEL_RUNNER"] = str(int(engine.endswith("-v2")))
    return env


def run(engine: str, caching: str, name: str, args: argparse.Namespace) -> Run:
    """One process; returns its RESULT rows and keeps its log."""
    label = f"{engine}-{caching}-{name}"
    log = args.out.parent / f"{label}.log"
    options = [*PLANS[name].options[args.mode], "--prefix-caching", caching]
    command = [sys.executable, str(HERE / "vllm_run.py"), "--label", label, *options, *args.run_options]
    start = time.monotonic()
    with log.open("w") as file:
        code = subprocess.run(
            command, env=environment(engine, name, args), stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    rows = [json.loads(line[7:]) for line in log.read_text().splitlines() if line.startswith("RESULT ")]
    print(f"{label}: exit {code}, {len(rows)} rows, {time.monotonic() - start:.0f} s", flush=True)
    if code:
        print("\n".join(log.read_text().splitlines()[-12:]), flush=True)
    return rows


def passes(rows: Run) -> Run:
    return [row for row in rows if row["event"] == "pass"]


def event(rows: Run, name: str) -> dict[str, Any]:
    return next((row for row in rows if row["event"] == name), {})


def verdict(native: Run, again: Run, ours: Run) -> str:
    """Whether ours equals native, pass by pass, where native equals itself."""
    if not (native and again and ours):
        return "not run"
    same = [a["digest"] == b["digest"] for a, b in zip(native, again, strict=False)]
    equal = [a["digest"] == o["digest"] for a, o in zip(native, ours, strict=False)]
    hits = [a["cached_tokens"] == o["cached_tokens"] for a, o in zip(native, ours, strict=False)]
    if not all(same):
        return f"native repeats itself in {sum(same)} of {len(same)} passes, ours equals it in {sum(equal)}"
    return f"{sum(equal)} of {len(equal)} passes equal, hits equal in {sum(hits)}"


def speed(rows: Run) -> tuple[float, float]:
    """Output tokens/s of the first pass, and the median of the later ones."""
    if len(rows) < 2:
        return float("nan"), float("nan")
    return rows[0]["output_tokens_per_s"], statistics.median(r["output_tokens_per_s"] for r in rows[1:])


def tokens_table(results: Results) -> str:
    lines = ["| engine | prefix caching | kvcached | highest pages first |", "|---|---|---|---|"]
    for (engine, caching), runs in results.items():
        native, again, ours, top = (passes(runs.get(name, [])) for name in RUNS["tokens"])
        lines.append(
            f"| {engine} | {caching} | {verdict(native, again, ours)} | {verdict(native, again, top)} |"
        )
    return "\n".join(lines)


def speed_table(results: Results) -> str:
    lines = [
        "| engine | prefix caching | run | first pass, tokens/s | ratio | same prompts again, tokens/s | ratio "
        "| MiB after start / peak / idle | after the prefix cache is reset |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (engine, caching), runs in results.items():
        first, later = speed(passes(runs.get("native", [])))
        for name, rows in runs.items():
            mine, mine_later = speed(passes(rows))
            peak = max((row["peak_mib"] for row in passes(rows)), default=0)
            memory = (
                f"{event(rows, 'start').get('used_mib')} / {peak} / {event(rows, 'idle').get('used_mib')}"
            )
            lines.append(
                f"| {engine} | {caching} | {name} | {mine:.0f} | {mine / first:.3f} | {mine_later:.0f} | {mine_later / later:.3f} "
                f"| {memory} | {event(rows, 'reset').get('used_mib', '')} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["tokens", "speed"])
    parser.add_argument(
        "--engines", nargs="+", required=True, help="0.26.0-v1, 0.26.0-v2 (the runner), 0.29.0, ..."
    )
    parser.add_argument(
        "--site", action="append", default=[], help="NAME=FOLDER of packages for those engines"
    )
    parser.add_argument("--peer", default="", help="folder of the peer's package")
    parser.add_argument("--runs", nargs="+", choices=PLANS)
    parser.add_argument("--caching", nargs="+", choices=["off", "on"])
    parser.add_argument("--jobs", type=int, help="engines at once; default 10 for tokens, always 1 for speed")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.run_options = sys.argv[at + 1 :]
    args.sites = dict(item.split("=", 1) for item in args.site)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    caching = args.caching or {"tokens": ["off", "on"], "speed": ["on"]}[args.mode]
    wanted = [(e, c, r) for e in args.engines for c in caching for r in args.runs or RUNS[args.mode]]
    results: Results = {}
    with concurrent.futures.ThreadPoolExecutor(1 if args.mode == "speed" else args.jobs or 10) as workers:
        for (engine, setting, name), rows in zip(
            wanted, workers.map(lambda job: run(*job, args), wanted), strict=True
        ):
            results.setdefault((engine, setting), {})[name] = rows
            args.out.write_text(json.dumps([[*key, runs] for key, runs in results.items()], indent=1))
    print(tokens_table(results) if args.mode == "tokens" else speed_table(results))


if __name__ == "__main__":
    main()

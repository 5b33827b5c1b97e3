"""vLLM and SGLang on a GPU, natively and with kvcached, in one run: the tables of docs/FIGURES.md.

    python -m bench.matrix tokens --engines 0.26.0-v1 0.29.0 sglang-0.5.17-p1 sglang-0.5.17-p16-det --out out/tokens.json
    python -m bench.matrix speed --engines 0.29.0 sglang-0.5.17-p1 --out out/speed.json -- --size 8b --dummy

`tokens`: every engine natively twice, with kvcached, and with kvcached handing out the highest pages of a whole-card id space first;
prefix caching off and on; several at once, for tokens do not depend on time. Compared pass by pass, request by request, and equality
is claimed only where native equals itself. `speed`: one engine at a time, natively and with kvcached.

Every run is a process of its own (bench.vllm_run, bench.sglang_run). The engine's name says what it needs: `0.26.0-v1` is vLLM 0.26.0
with model runner V1, `sglang-0.5.17-p16-det` is SGLang with pages of 16 tokens and batch-invariant kernels. `--site NAME=FOLDER` puts a
folder of packages before all others for the engines whose name starts with NAME (a machine without a network); without it the
installed engine is used. The peer's runs (`--runs peer`) take `--peer FOLDER` in place of PYTHONPATH.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

from bench import tables
from bench.processes import ROOT, end_group

COMMON = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # The scheduler in the caller's process: its batches, and so the roundings, repeat from run to run.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
}
KVCACHED = {"ENABLE_KVCACHED": "true", "KVCACHED_STRICT": "1"}
SMALL, WHOLE_CARD = ("--kv-gib", "4"), ("--kv-gib", "120")


class Plan(NamedTuple):
    """How one run of an engine differs from the others."""

    environment: dict[str, str]
    tokens_options: tuple[str, ...] = SMALL


PLANS = {
    "native": Plan({}),
    "native2": Plan({}),
    "ours": Plan(KVCACHED),
    "top": Plan({**KVCACHED, "KVCACHED_PAGE_ORDER": "highest"}, WHOLE_CARD),
    "peer": Plan({"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}),
}
RUNS = {"tokens": ["native", "native2", "ours", "top"], "speed": ["native", "ours"]}


def command_of(engine: str) -> tuple[list[str], dict[str, str]]:
    """Module, options and environment that an engine's name asks for."""
    if not engine.startswith("sglang-"):
        runner = {"v1": "0", "v2": "1"}.get(engine.rpartition("-")[2])
        return ["bench.vllm_run"], {} if runner is None else {"VLLM_USE_V2_MODEL_RUNNER": runner}
    command = ["bench.sglang_run"]
    for part in engine.split("-")[2:]:
        if part == "det":
            command.append("--deterministic")
        elif part[0] == "p" and part[1:].isdigit():
            command += ["--page-size", part[1:]]
        else:
            raise SystemExit(f"{engine}: {part} is neither p<page size> nor det")
    return command, {}


def site_of(engine: str, sites: dict[str, str]) -> list[str]:
    """Folders of packages for an engine."""
    return [folder for name, folder in sites.items() if engine.startswith(name)]


def environment_of(paths: list[str], extra: dict[str, str]) -> dict[str, str]:
    """Of an engine's process: what both engines need, those paths, and `extra`."""
    env = {**os.environ, **COMMON, **extra}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # every process would compile the engine anew
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return env


def run(engine: str, caching: str, name: str, args: argparse.Namespace) -> tables.Run:
    """One process; returns what it said and keeps its log."""
    label = f"{engine}-{caching}-{name}"
    plan, (command, extra) = PLANS[name], command_of(engine)
    if "KVCACHED_STRICT" in plan.environment:
        extra = {**extra, "KVCACHED_IPC_NAME": label}
    ours = args.peer if name == "peer" else os.environ.get("PYTHONPATH", "")
    env = environment_of([ours, *site_of(engine, args.sites)], {**plan.environment, **extra})
    left_s = args.deadline - time.monotonic()
    if left_s <= 0:
        print(f"{label}: not run, the time is over", flush=True)
        return tables.NO_RUN
    tokens = args.out.parent / "tokens"
    command = [sys.executable, "-m", *command, "--label", label, "--prefix-caching", caching]
    if args.mode == "tokens":
        command += [*plan.tokens_options, "--tokens-out", str(tokens)]
    log = args.out.parent / f"{label}.log"
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *args.run_options],
            env=env,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = process.wait(min(args.limit_s, left_s))
        except subprocess.TimeoutExpired:
            code = -1
        end_group(process)
    rows = [json.loads(line[7:]) for line in log.read_text().splitlines() if line.startswith("RESULT ")]
    print(f"{label}: exit {code}, {len(rows)} rows, {time.monotonic() - start:.0f} s", flush=True)
    if code:
        print("\n".join(log.read_text().splitlines()[-12:]), flush=True)
    passes = [row["number"] for row in rows if row["event"] == "pass"] if args.mode == "tokens" else []
    return tables.Run(rows, [json.loads((tokens / f"{label}-{n}.json").read_text()) for n in passes])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["tokens", "speed"])
    parser.add_argument("--engines", nargs="+", required=True, help="as above; options for the runs after --")
    parser.add_argument(
        "--site", action="append", default=[], help="NAME=FOLDER of packages for those engines"
    )
    parser.add_argument("--peer", default="", help="folder of the peer's package")
    parser.add_argument("--runs", nargs="+", choices=PLANS)
    parser.add_argument("--caching", nargs="+", choices=["off", "on"])
    parser.add_argument("--jobs", type=int, help="engines at once; default 8 for tokens, always 1 for speed")
    parser.add_argument("--limit-s", type=int, default=600, help="for one process")
    parser.add_argument("--budget-s", type=int, default=86400, help="for all: what there is then is shown")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.run_options = sys.argv[at + 1 :]
    args.sites = dict(item.split("=", 1) for item in args.site)
    args.deadline = time.monotonic() + args.budget_s
    args.out = args.out.resolve()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    caching = args.caching or {"tokens": ["off", "on"], "speed": ["on"]}[args.mode]
    wanted = [(e, c, r) for e in args.engines for c in caching for r in args.runs or RUNS[args.mode]]
    table = tables.tokens_table if args.mode == "tokens" else tables.speed_table
    results: tables.Results = {(engine, setting): {} for engine, setting, _ in wanted}
    with concurrent.futures.ThreadPoolExecutor(1 if args.mode == "speed" else args.jobs or 8) as workers:
        jobs = {workers.submit(run, *job, args): job for job in wanted}
        for done in concurrent.futures.as_completed(jobs):
            engine, setting, name = jobs[done]
            results[engine, setting][name] = done.result()
            rows = [[*key, {name: run.rows for name, run in runs.items()}] for key, runs in results.items()]
            args.out.write_text(json.dumps(rows, indent=1))
            if args.mode == "speed":  # one that is cut short loses what was not run, and no more
                print(table(results), flush=True)
    if args.mode == "tokens":
        print(table(results))


if __name__ == "__main__":
    main()

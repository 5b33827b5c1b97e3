"""vLLM on a GPU, natively and with kvcached, in one run: the tables of docs/FIGURES.md.

    python bench/vllm_matrix.py --engines 0.26.0-v1 0.26.0-v2 0.29.0 --out results.json

Every engine runs in processes of its own (bench/vllm_run.py): natively twice, with kvcached, and with kvcached handing out the
highest pages of a whole-card id space first. Digests are compared pass by pass, and only where native equals itself. An
engine is a name and what its processes need: `--site NAME=FOLDER` puts a folder of packages before all others for the
engines whose name starts with NAME (a machine without network); without it the installed vLLM is used.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

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


def environment(engine: str, sites: dict[str, str], extra: dict[str, str]) -> dict[str, str]:
    env = {**os.environ, **COMMON, **extra}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    for name, folder in sites.items():
        if engine.startswith(name):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))
    if engine.endswith(("-v1", "-v2")):
        env["VLLM_USE_V2_MODEL_RUNNER"] = str(int(engine.endswith("-v2")))
    return env


def run(engine: str, label: str, args: argparse.Namespace, extra: dict[str, str], *options: str) -> Run:
    """One process; returns its RESULT rows and keeps its log."""
    log = args.logs / f"{engine}-{label}.log"
    command = [sys.executable, str(HERE / "vllm_run.py"), "--label", f"{engine}-{label}", *args.run_options, *options]
    start = time.monotonic()
    with log.open("w") as file:
        code = subprocess.run(
            command, env=environment(engine, args.sites, extra), stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    rows = [json.loads(line[7:]) for line in log.read_text().splitlines() if line.startswith("RESULT ")]
    print(f"{engine} {label}: exit {code}, {len(rows)} rows, {time.monotonic() - start:.0f} s", flush=True)
    if code:
        print("\n".join(log.read_text().splitlines()[-15:]), flush=True)
    return rows


def passes(rows: Run, caching: bool) -> Run:
    return [r for r in rows if r["event"] == "pass" and r["caching"] == caching]


def event(rows: Run, caching: bool, name: str) -> dict[str, Any]:
    return next((r for r in rows if r["event"] == name and r["caching"] == caching), {})


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


def table(results: dict[str, dict[str, Run]]) -> str:
    lines = [
        "| engine | prefix caching | tokens: kvcached | tokens: highest pages first | first pass, ratio | same prompts again, ratio "
        "| native again: first, later | MiB native: start / peak / idle | MiB kvcached: start / peak / idle |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for engine, runs in results.items():
        for caching in (False, True):
            native, again, ours, top = (passes(runs.get(k, []), caching) for k in ("native", "native2", "ours", "top"))
            if not native:
                continue
            first, later = speed(native)
            first2, later2 = speed(again)
            mine, mine_later = speed(ours)
            best, best_later = max(first, first2), max(later, later2)

            def memory(rows: Run) -> str:
                start, idle = event(rows, caching, "start"), event(rows, caching, "idle")
                peak = max((r["peak_mib"] for r in passes(rows, caching)), default=0)
                return f"{start.get('used_mib')} / {peak} / {idle.get('used_mib')}"

            lines.append(
                f"| {engine} | {'on' if caching else 'off'} | {verdict(native, again, ours)} | {verdict(native, again, top)} "
                f"| {mine / best:.3f} | {mine_later / best_later:.3f} | {first2 / first:.3f}, {later2 / later:.3f} "
                f"| {memory(runs.get('native', []))} | {memory(runs.get('ours', []))} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", required=True, help="0.26.0-v1, 0.26.0-v2 (the runner), 0.29.0, ...")
    parser.add_argument("--site", action="append", default=[], help="NAME=FOLDER of packages for those engines")
    parser.add_argument("--runs", nargs="+", default=["native", "native2", "ours", "top"])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/vllm_matrix.json"))
    parser.add_argument("run_options", nargs="*", help="after --: options for vllm_run.py")
    args = parser.parse_args()
    args.sites = dict(item.split("=", 1) for item in args.site)
    args.logs = args.out.parent
    args.logs.mkdir(parents=True, exist_ok=True)
    plans: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
        "native": ({}, ()),
        "native2": ({}, ()),
        "ours": (KVCACHED, ("--kvctl",)),
        "top": ({**KVCACHED, "KVCACHED_PAGE_ORDER": "highest"}, ("--utilization", "0.9")),
    }
    results: dict[str, dict[str, Run]] = {}
    for engine in args.engines:
        for name in args.runs:
            extra, options = plans[name]
            results.setdefault(engine, {})[name] = run(engine, name, args, extra, *options)
            args.out.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()

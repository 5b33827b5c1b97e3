"""Build the fuzz targets and run them.

    python3 tools/fuzz.py                              every target for 20 s, as many side by side as there are cores
    python3 tools/fuzz.py ledger wire --seconds 300    two of them, longer
    python3 tools/fuzz.py ledger --runs 10000000       a number of executions
    python3 tools/fuzz.py ledger --input FILE          what this input says, and one execution of it
    python3 tools/fuzz.py --clippy                     lint them (their flags are not those of the workspace)

Needs a stable toolchain and a C++ compiler. What a run has learnt stays in fuzz/corpus/TARGET, what fails comes to fuzz/artifacts/TARGET;
`cargo fuzz run TARGET` uses the same folders.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
FUZZ = REPO / "fuzz"
CACHE = Path(os.environ.get("KVCACHED_CACHE") or Path.home() / ".cache" / "kvcached").resolve()
TARGET_DIR = Path(os.environ.get("CARGO_TARGET_DIR") or CACHE / "target").resolve()
# Those of cargo-fuzz 0.13.2, but for its tracing of comparisons: inputs are structured, so that it finds nothing more and takes half
# the time.
FLAGS = (
    *("-Cpasses=sancov-module", "-Cllvm-args=-sanitizer-coverage-level=4"),
    *("-Cllvm-args=-sanitizer-coverage-inline-8bit-counters", "-Cllvm-args=-sanitizer-coverage-pc-table"),
    *("-Cllvm-args=-sanitizer-coverage-stack-depth", "-Cllvm-args=-simplifycfg-branch-fold-threshold=0"),
    *("--cfg", "fuzzing"),
)
ADDRESS = ("-Zsanitizer=address",)


class Target(NamedTuple):
    """How a target is run."""

    max_len: int  # bytes of an input
    flags: tuple[str, ...] = ()


TARGETS = {
    "ledger": Target(max_len=128),
    "peers": Target(max_len=256),
    "protocol": Target(max_len=256),
    "record": Target(max_len=512, flags=ADDRESS),  # the one crate under test that has `unsafe`
    "shared": Target(max_len=512, flags=ADDRESS),
    "wire": Target(max_len=512),
}


class BuildError(Exception):
    """Says all there is to say."""


def host() -> str:
    """The triple of this machine; naming it keeps build scripts free of the fuzzer's flags."""
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True, cwd=REPO).stdout
    return version.split("host: ", 1)[1].split(maxsplit=1)[0]


def cargo(command: str, flags: tuple[str, ...], *arguments: str) -> Path:
    """Runs cargo with the fuzzer's flags; gives the folder of what it built."""
    folder = TARGET_DIR / ("fuzz-address" if flags else "fuzz")
    environ = dict(os.environ)
    environ |= {"CARGO_TARGET_DIR": str(folder), "CARGO_INCREMENTAL": "0"}
    # Coverage and sanitizers are no part of the stable compiler's promise, and are in it.
    environ |= {"RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": " ".join((*FLAGS, *flags))}
    triple = host()
    options = ("--release", "--locked", "--manifest-path", str(FUZZ / "Cargo.toml"), "--target", triple)
    if subprocess.run(["cargo", command, *options, *arguments], env=environ, cwd=REPO).returncode:
        raise BuildError(f"cargo {command} failed")
    return folder / triple / "release"


def build(names: list[str]) -> dict[str, Path]:
    """Targets and their programs."""
    programs: dict[str, Path] = {}
    for flags in sorted({TARGETS[name].flags for name in names}):
        alike = [name for name in names if TARGETS[name].flags == flags]
        folder = cargo("build", flags, *(word for name in alike for word in ("--bin", name)))
        programs |= {name: folder / name for name in alike}
    return programs


def environ(scratch: str, **more: str) -> dict[str, str]:
    # Where the targets of records make their files.
    return {**os.environ, "TMPDIR": scratch, "RUST_BACKTRACE": "1", **more}


def memory() -> str | None:
    """A folder for scratch files in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run(name: str, program: Path, limit: str) -> bool:
    """One target with as much as it is given; prints a line when all is well, and else what went wrong."""
    corpus, artifacts = FUZZ / "corpus" / name, FUZZ / "artifacts" / name
    corpus.mkdir(parents=True, exist_ok=True)
    artifacts.mkdir(parents=True, exist_ok=True)
    command = [
        *(
            str(program),
            str(corpus),
            limit,
            f"-max_len={TARGETS[name].max_len}",
            f"-artifact_prefix={artifacts}/",
        ),
        # Long inputs soon: histories are what is looked for. A hang is a finding.
        *("-len_control=20", "-timeout=120", "-rss_limit_mb=1024", "-print_final_stats=1"),
    ]
    with tempfile.TemporaryDirectory(prefix="kvcached-fuzz-", dir=memory()) as scratch:
        done = subprocess.run(
            command,
            env=environ(scratch),
            cwd=FUZZ,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    log = done.stdout
    if done.returncode == 0:
        print(f"{name:10} {summary(log)}\n", end="", flush=True)  # in one piece: others print too
        return True
    lines = [
        line for line in log.splitlines() if not re.match(r"#\d|\s*NEW|\s*REDUCE|INFO: |WARNING: ", line)
    ]
    executions = re.findall(r"^#(\d+)\s", log, re.MULTILINE)
    print(f"{name}: FOUND after {executions[-1] if executions else 0} executions", *lines[-60:], sep="\n  ")
    for path in re.findall(r"Test unit written to (\S+)", log):
        print(f"  to see it again: python3 tools/fuzz.py {name} --input {path}", flush=True)
    return False


def summary(log: str) -> str:
    """Executions, and what of the code they reached, of a run in which nothing was found."""
    last = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", log)[-1:] or [("?", "?", "?")]
    executions, per_second = (
        int(re.findall(rf"stat::{stat}:\s*(\d+)", log)[0])
        for stat in ("number_of_executed_units", "average_exec_per_sec")
    )
    edges, features, kept = last[0]
    return (
        f"{executions:>10,} executions  {per_second:>7,} a second  {edges:>5} edges  {features:>6} features  "
        f"{kept:>5} inputs kept"
    )


def show(name: str, program: Path, path: Path) -> bool:
    """What an input says, as the target reads it, then what comes of it."""
    with tempfile.TemporaryDirectory(prefix="kvcached-fuzz-", dir=memory()) as scratch:
        words = Path(scratch) / "input"
        subprocess.run(
            [str(program), str(path)],
            env=environ(scratch, RUST_LIBFUZZER_DEBUG_PATH=str(words)),
            check=False,
            capture_output=True,
        )
        print(words.read_text())
        return subprocess.run([str(program), str(path)], env=environ(scratch), check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join(TARGETS))
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--seconds", type=int, default=20, help="of each target")
    much.add_argument("--runs", type=int, help="executions of each target")
    much.add_argument("--input", type=Path, metavar="FILE", help="of one target")
    much.add_argument("--clippy", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at one time")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if options.input and (len(names) != 1 or not options.input.is_file()):
        parser.error("--input is a file, for one target")
    try:
        if options.clippy:
            cargo("clippy", (), "--", "-D", "warnings")
            return 0
        programs = build(names)
    except BuildError as failed:
        print(failed, file=sys.stderr)
        return 1
    if options.input:
        return 0 if show(names[0], programs[names[0]], options.input.resolve()) else 1
    limit = f"-runs={options.runs}" if options.runs else f"-max_total_time={options.seconds}"
    with ThreadPoolExecutor(options.jobs) as pool:
        well = list(pool.map(lambda name: run(name, programs[name], limit), names))
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())

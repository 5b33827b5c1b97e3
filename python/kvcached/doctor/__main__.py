"""`python -m kvcached.doctor [vllm|sglang]`; exit code 1 where an engine would not be elastic here."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcached.doctor import engines, machine, model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.doctor.finding import Finding

__all__ = ["main"]

EXIT_OK, EXIT_PROBLEM = 0, 1


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """All of them, in the order in which they are shown; each as soon as it is known."""
    yield from machine.installation()
    yield from machine.settings()
    yield from machine.devices()
    for name in [args.engine] if args.engine else engines.ENGINES:
        print(f"looking at {name} ...", file=sys.stderr, flush=True)
        yield from engines.engine(name, asked=args.engine is not None)
    if args.model:
        yield from model.geometry(
            args.model, args.device, ranks=args.tensor_parallel_size, block_tokens=args.block_size
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Show what was found; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kvctl doctor",
        description="Shows whether engines' KV caches are elastic here, and if not why and what to do.",
        epilog="kvctl doctor --python PATH ... looks with another Python than this one.",
    )
    parser.add_argument("engine", nargs="?", choices=engines.ENGINES, help="also list every seam of this one")
    parser.add_argument("--model", metavar="FOLDER", help="show the pages of the model with this config.json")
    parser.add_argument("--device", default="cpu", help="for --model: cuda:N or cpu")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="for --model")
    parser.add_argument("--block-size", type=int, default=16, help="for --model: tokens of a block")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    if args.tensor_parallel_size < 1 or args.block_size < 1:
        parser.error("--tensor-parallel-size and --block-size are at least 1")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    found = []
    for finding in findings(args):
        found.append(finding)
        if not args.json:
            show(finding)
    problems = sum(finding.level == "problem" for finding in found)
    if args.json:
        print(
            json.dumps({"problems": problems, "findings": [asdict(finding) for finding in found]}, indent=2)
        )
    else:
        print(f"{problems} problem{'s' * (problems != 1)}")
    return EXIT_PROBLEM if problems else EXIT_OK


def show(finding: Finding) -> None:
    print(f"{finding.level:<8}{finding.topic}: {finding.text}", flush=True)
    if finding.advice:
        print(f"{'':<8}-> {finding.advice}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""One engine, the same requests in passes, `RESULT {json}` lines: what bench.vllm_run and bench.sglang_run have in common.

A line has the options' label and an `event`: `start`, `ready` (warm), `pass`, `idle`, `reset` (prefix cache given back). Memory is
that of the whole device above what was used before the start, in MiB. `kv` is the instance record of KVCACHED_IPC_NAME as any other
process sees it (`kvctl list --json`), None for an engine that has none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from demo import model as models

if TYPE_CHECKING:
    from collections.abc import Callable

Tokens = list[list[int]]  # of every request
SETTLE_S = 1.0
WARM_REQUESTS = 8
KVCTL = "import sys; from kvcached._kvctl import main; sys.exit(main())"


class Answer(NamedTuple):
    """What came back for one batch of prompts, in their order."""

    tokens: Tokens
    cached_tokens: int


class Engine(Protocol):
    """An engine as the passes see it."""

    def facts(self) -> dict[str, Any]:
        """What it started with: its version, and how much KV cache it counts on."""

    def generate(self, prompts: Tokens, output_tokens: int) -> Answer:
        """All prompts as one batch, greedily, `output_tokens` each."""

    def reset(self) -> bool:
        """Give the prefix cache back."""

    def close(self) -> None:
        """End its processes."""


class DeviceMemory(NamedTuple):
    """GPU 0, all its users."""

    used_mib: int
    total_mib: int


def device_memory() -> DeviceMemory:
    """Zeros without a GPU. Asks NVML: a CUDA context of our own would count."""
    try:
        import pynvml
    except ImportError:
        return DeviceMemory(0, 0)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DeviceMemory(0, 0)
    found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    return DeviceMemory(int(found.used) >> 20, int(found.total) >> 20)


def used_mib() -> int:
    """Memory in use on the device."""
    return device_memory().used_mib


class PeakMemory(threading.Thread):
    """The largest use of the device while it is open, sampled at 4 Hz: each look is a driver call that the engine feels."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib = used_mib()
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.25):
            self.mib = max(self.mib, used_mib())

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()
        self.mib = max(self.mib, used_mib())


def kv_state() -> dict[str, int] | None:
    """Bytes of this engine's KV cache, wherever its scheduler runs."""
    name = os.environ.get("KVCACHED_IPC_NAME")
    if name is None:
        return None
    command = [sys.executable, "-c", KVCTL, "list", "--json"]
    shown = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    rows = [row for row in shown["instances"] if row["name"] == name]
    return {key: value for key, value in rows[0].items() if key.endswith("_bytes")} if rows else None


def prompts(seed: int, count: int, tokens: int) -> Tokens:
    """The same arguments give the same prompts; token ids that every model of demo/model.py has."""
    source = random.Random(seed)
    return [[source.randrange(3, 1000) for _ in range(tokens)] for _ in range(count)]


def seed_of(line: str) -> int:
    """Of the prompts that a line on standard input asks for."""
    last = line.split()[-1:]
    return int(last[0]) if last and last[0].isdigit() else 1


def digest(tokens: Tokens) -> str:
    """Short name of a pass's tokens."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def dtype_of(device: str) -> str:
    """float32 on a CPU, where tokens must be equal across engines too."""
    return "float32" if device == "cpu" else "bfloat16"


def model_folder(size: str, device: str = "cuda", *, weights: bool = True) -> str:
    """The model, written by the first who asks."""
    folder = f"{tempfile.gettempdir()}/kvcached-model-{size}-{device}{'' if weights else '-dummy'}"
    return str(models.write(folder, size, dtype_of(device), weights=weights))


def parse(
    description: str | None, arguments: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """The options of both engines, and by `arguments` those of one."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--label", required=True)
    parser.add_argument("--size", choices=models.SHAPES, default="1b")
    parser.add_argument(
        "--dummy", action="store_true", help="dummy weights: right for speed and memory, useless for tokens"
    )
    parser.add_argument("--prefix-caching", choices=["on", "off"], default="on")
    parser.add_argument("--fraction", type=float, default=0.5, help="of the device, for weights and KV cache")
    parser.add_argument(
        "--kv-gib", type=float, help="size of the KV cache, instead of --fraction: several engines at once"
    )
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-running", type=int, help="requests at once; default the engine's own")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the scripts, with --size tiny"
    )
    parser.add_argument(
        "--on-command",
        action="store_true",
        help="begin each pass when a line comes on standard input; a number at its end is the seed of other prompts",
    )
    parser.add_argument("--tokens-out", type=pathlib.Path, help="folder for the tokens of every pass")
    arguments(parser)
    return parser.parse_args()


def drive(args: argparse.Namespace, start: Callable[[argparse.Namespace, str], Engine]) -> None:
    """Start the engine on the model's folder and run the passes."""
    model = model_folder(args.size, args.device, weights=not args.dummy)
    base_mib = used_mib()

    def say(event: str, **values: Any) -> None:
        row = {"label": args.label, "event": event, "time": round(time.monotonic(), 3), **values}
        row |= {"used_mib": used_mib() - base_mib, "kv": kv_state()}
        print("RESULT " + json.dumps(row), flush=True)
        if row["kv"] is None and "KVCACHED_IPC_NAME" in os.environ:
            raise SystemExit("kvctl does not list this engine: it runs natively")

    begin = time.perf_counter()
    engine = start(args, model)
    say("start", seconds=round(time.perf_counter() - begin, 1), **engine.facts())
    requests = prompts(1, args.requests, args.input_tokens)
    engine.generate(prompts(2, WARM_REQUESTS, args.input_tokens), args.output_tokens)
    say("ready")
    for number in range(args.passes):
        # Engines reset their estimates when they are idle: every run begins its passes from there, however long the
        # row before took to print.
        time.sleep(SETTLE_S)
        if args.on_command:
            if not (line := sys.stdin.readline()):
                break
            requests = prompts(seed_of(line), args.requests, args.input_tokens)
        with PeakMemory() as peak:
            begin = time.perf_counter()
            answer = engine.generate(requests, args.output_tokens)
            seconds = time.perf_counter() - begin
        if args.tokens_out:
            args.tokens_out.mkdir(parents=True, exist_ok=True)
            (args.tokens_out / f"{args.label}-{number}.json").write_text(json.dumps(answer.tokens))
        say(
            "pass",
            number=number,
            seconds=round(seconds, 3),
            digest=digest(answer.tokens),
            cached_tokens=answer.cached_tokens,
            output_tokens_per_s=round(sum(map(len, answer.tokens)) / seconds, 1),
            peak_mib=peak.mib - base_mib,
        )
    time.sleep(SETTLE_S)
    say("idle")
    if args.prefix_caching == "on":
        say("reset", ok=engine.reset())
    engine.close()

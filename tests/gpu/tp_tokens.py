"""Tensor parallel vLLM on several GPUs: the same tokens as natively, the same memory on every rank, and an end when a worker is killed.

    python -m tests.gpu.tp_tokens --tp 2 --passes 2 --kill-worker --out tp.json

Each engine runs in a process of its own with its scheduler in it (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that native vLLM repeats
itself and its tokens can be compared pass by pass: native once for the compile cache and twice to compare, then elastic; with `--own-process`
also elastic as users run it, the scheduler in vLLM's engine process, whose tokens are not compared. CUDA graphs are on unless
`--eager`. `--one-gpu` puts all ranks on the first GPU, each with `--kv-gib` of KV cache natively: NCCL 2.30 and later carries that out
under NCCL_MULTI_RANK_GPU_ENABLE=1, slowly, for the ranks take turns on the card; another NCCL than torch's own goes in by LD_PRELOAD
and VLLM_NCCL_SO_PATH. Prints and writes JSON; exit status 1 where something does not hold. Needs no network, and with `--device cpu` no GPU. Where
a command may not take so long: `--runs cold,native`, then `--runs native-again,elastic`, with one `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import glob
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import harness
from bench.processes import end_group

if TYPE_CHECKING:
    from collections.abc import Iterator

END_TIMEOUT_S = 120
SAMPLE_S = 0.25
MIB = 1 << 20


# ------------------------------------------------------------ asked of each worker


def worker_state(worker: Any) -> dict[str, Any]:
    """Memory of one rank: its own count of pages, and the device as the driver sees it."""
    import torch

    from kvcached.integration.rank import RankMemory

    rank = RankMemory.of(worker.vllm_config.cache_config)
    state: dict[str, Any] = {"pid": os.getpid(), "rank": worker.rank, "device": str(worker.device)}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        state["device_used_mib"] = (total - free) // MIB
    if rank is not None:
        ftensor = rank.ftensor
        state |= {
            "address": rank.address,
            "kv_mapped_bytes": ftensor.mapped_bytes,
            "pages": ftensor.mapped_pages(),
            "geometry": ftensor.geometry.explain(),
            "unbacked": ftensor.unbacked,
        }
    return state


# ------------------------------------------------------------ one engine


def run_engine(args: argparse.Namespace) -> None:
    """The child: prints a `RESULT {json}` line for each event."""
    import vllm

    # Workers that are forked from here have it too.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    model = harness.model_folder(args.size, args.device)
    begin = time.monotonic()
    options: dict[str, Any] = {
        "model": model,
        "dtype": harness.dtype_of(args.device),
        "skip_tokenizer_init": True,
        "max_model_len": args.max_model_len,
        "enforce_eager": args.eager,
        "enable_prefix_caching": True,
        "seed": 0,
        "disable_log_stats": True,
        "tensor_parallel_size": args.tp,
    }
    if args.device == "cuda":
        options["gpu_memory_utilization"] = args.fraction
    if args.one_gpu:
        all_ranks_on_one_gpu()
        # A rank that measures the card's memory would count the other's.
        options["kv_cache_memory_bytes"] = int(args.kv_gib * (1 << 30))
        options |= {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
        # Each graph holds an exchange for each layer, and is run as it is captured.
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    llm = vllm.LLM(**options)
    report("start", seconds=time.monotonic() - begin, vllm=vllm.__version__, workers=states(llm))
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True, detokenize=False
    )
    prompts = harness.prompts(1, args.requests, args.input_tokens)

    def generate() -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        generate.hits = sum(output.num_cached_tokens or 0 for output in outputs)  # type: ignore[attr-defined]
        return [list(output.outputs[0].token_ids) for output in outputs]

    for number in range(args.passes):
        begin = time.monotonic()
        with sampled(args.name) as over_time:
            tokens = generate()
        seconds = time.monotonic() - begin
        report(
            "pass",
            number=number,
            digest=harness.digest(tokens),
            hits=generate.hits,  # type: ignore[attr-defined]
            seconds=seconds,
            tokens_per_s=args.requests * args.output_tokens / seconds,
            kv_over_time=over_time,
            workers=states(llm),
        )
    llm.reset_prefix_cache()
    time.sleep(2)
    report("idle", workers=states(llm), kv=harness.kv_state())
    if args.kill_worker:
        kill_a_worker(llm, generate)
    begin = time.monotonic()
    llm.llm_engine.engine_core.shutdown()
    report("end", seconds=time.monotonic() - begin)


def all_ranks_on_one_gpu() -> None:
    """Workers that are forked from here take device 0, whatever their rank."""
    import functools

    from vllm.v1.worker.gpu_worker import Worker

    init_device = Worker.init_device

    @functools.wraps(init_device)
    def on_the_first(self: Any) -> Any:
        self.local_rank = 0
        return init_device(self)

    Worker.init_device = on_the_first
    os.environ |= {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }


def states(llm: Any) -> list[dict[str, Any]]:
    return list(llm.collective_rpc(worker_state))


def kill_a_worker(llm: Any, generate: Any) -> None:
    """The last rank's process is killed while requests run."""
    workers = states(llm)
    victim = workers[-1]["pid"]
    killed_at = [0.0]

    def kill() -> None:
        killed_at[0] = time.monotonic()
        os.kill(victim, signal.SIGKILL)

    timer = threading.Timer(0.5, kill)
    timer.start()
    error = "none"
    try:
        for _ in range(1000):
            generate()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    report("killed", seconds=time.monotonic() - killed_at[0], error=error, workers=workers)


@contextlib.contextmanager
def sampled(name: str) -> Iterator[list[dict[str, float]]]:
    """KV memory (of one rank) over time, as any other process sees it."""
    samples: list[dict[str, float]] = []
    if not name:
        yield samples
        return
    end, begin = threading.Event(), time.monotonic()

    def sample() -> None:
        while not end.wait(SAMPLE_S):
            if state := harness.kv_state():
                samples.append({"s": round(time.monotonic() - begin, 2), **state})

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        end.set()
        thread.join()


def report(event: str, **facts: Any) -> None:
    print("RESULT", json.dumps({"event": event} | facts), flush=True)


# ------------------------------------------------------------ all of them


def child(
    label: str,
    args: argparse.Namespace,
    *,
    elastic: bool,
    own_process: bool = False,
    kill_worker: bool = False,
) -> dict[str, Any]:
    """One engine, what it reported, and what it left behind."""
    environ = {k: v for k, v in os.environ.items() if "KVCACHED" not in k}
    name = f"tp-{label}-{os.getpid()}" if elastic else ""
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if own_process else "0"
    # A function of ours goes to the workers by vLLM's RPC: that of another process takes it only so.
    environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if elastic:
        environ |= {"ENABLE_KVCACHED": "true", "KVCACHED_STRICT": "1", "KVCACHED_IPC_NAME": name}
    same = (
        "tp",
        "passes",
        "size",
        "device",
        "requests",
        "input_tokens",
        "output_tokens",
        "max_model_len",
        "fraction",
        "kv_gib",
    )
    options = [word for key in same for word in (f"--{key.replace('_', '-')}", str(getattr(args, key)))]
    options += ["--eager"] * args.eager + ["--one-gpu"] * args.one_gpu + ["--kill-worker"] * kill_worker
    command = [sys.executable, "-m", "tests.gpu.tp_tokens", "--child", "--name", name, *options]
    before = leftovers()
    begin = time.monotonic()
    log = Path(args.logs) / f"{label}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not a pipe: a worker that outlives its engine would hold it open.
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=out, start_new_session=True)
        status: int | str
        try:
            status = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            status = f"no end after {args.limit:.0f} s: {log} ends with where every process stands"
            for pid in listeners(process.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR2)
                    time.sleep(1)  # one after the other: they write into one file
            end_group(process)
    lines = log.read_text(errors="replace").splitlines()
    events = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    pids = {worker["pid"] for event in events for worker in event.get("workers", ())}
    return {
        "label": label,
        "status": status,
        "seconds": time.monotonic() - begin,
        "events": events,
        "left": sorted(set(leftovers()) - set(before)),
        "left_processes": still_there(pids),
    }


def listeners(session: int) -> list[int]:
    """Processes of a session that show where they stand when SIGUSR2 comes."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            status = dict(line.split(":\t", 1) for line in (path / "status").read_text().splitlines())
            caught = int(status["SigCgt"], 16) >> (signal.SIGUSR2 - 1) & 1
            if caught and os.getsid(int(path.name)) == session:
                found.append(int(path.name))
    return found


def leftovers() -> list[str]:
    """Files of ours that outlive their engine where something is wrong: sockets, and records in shared memory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/nonexistent")
    patterns = [f"/tmp/kvcached-{os.geteuid()}/*", f"{runtime}/kvcached/*", "/dev/shm/*kvcached*/*"]
    return [path for pattern in patterns for path in glob.glob(pattern)]


def still_there(pids: set[int]) -> list[int]:
    deadline = time.monotonic() + END_TIMEOUT_S
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and not zombie(pid)]:
        if time.monotonic() > deadline:
            return alive
        time.sleep(0.1)
    return []


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def of(run: dict[str, Any], event: str) -> list[dict[str, Any]]:
    return [each for each in run["events"] if each["event"] == event]


def digests(run: dict[str, Any]) -> list[tuple[str, int]]:
    return [(each["digest"], each["hits"]) for each in of(run, "pass")]


def verdicts(runs: dict[str, dict[str, Any]], args: argparse.Namespace) -> dict[str, bool]:
    """What must hold of the runs that there are, by name."""
    found = {}
    if {"native", "native-again"} <= runs.keys():
        native = digests(runs["native"])
        found["native repeats itself"] = len(native) == args.passes and native == digests(
            runs["native-again"]
        )
    if {"native", "elastic"} <= runs.keys():
        same = digests(runs["native"]) == digests(runs["elastic"])
        found["elastic equals native, pass by pass, prefix hits too"] = same
    for label, run in runs.items():
        ended = run["status"] == 0 and len(of(run, "pass")) == args.passes and bool(of(run, "end"))
        found[f"{label}: runs and ends in order"] = ended
        found[f"{label}: leaves nothing"] = not run["left"] and not run["left_processes"]
        for event in of(run, "killed"):
            noticed = event["seconds"] < END_TIMEOUT_S and event["error"] != "none"
            found[f"{label}: a killed worker ends the engine"] = noticed
        if label.startswith("elastic"):
            found |= {f"{label}: {what}": holds for what, holds in elastic_verdicts(run).items()}
    return found


def elastic_verdicts(run: dict[str, Any]) -> dict[str, bool]:
    """What must hold of every rank's memory."""
    seen = [event["workers"] for event in run["events"] if event.get("workers")]
    if not seen or not all("pages" in worker for workers in seen for worker in workers):
        return {"every rank is elastic": False}
    at_rest = [event["workers"] for event in of(run, "idle")]
    return {
        "every rank is elastic": True,
        "the same geometry on all ranks": all(
            len({(worker["geometry"], worker["unbacked"]) for worker in workers}) == 1 for workers in seen
        ),
        "the same pages on all ranks at rest": all(
            len({tuple(worker["pages"]) for worker in workers}) == 1 for workers in at_rest
        ),
        "memory goes back": all(len(worker["pages"]) < 16 for workers in at_rest for worker in workers),
    }


#: By label: what is added to the arguments, and to `child`. The first of each kind fills vLLM's compile cache, which tokens depend on.
RUNS: dict[str, dict[str, Any]] = {
    "cold": {"elastic": False},
    "native": {"elastic": False},
    "native-again": {"elastic": False},
    "elastic": {"elastic": True},
    "elastic-own-process": {"elastic": True, "own_process": True},
    "native-killed": {"elastic": False, "kill_worker": True},
    "elastic-killed": {"elastic": True, "kill_worker": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--size", default="1b", help="a key of demo/model.py")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--fraction", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--kv-gib", type=float, default=4, help="with --one-gpu: KV cache of each rank")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each engine")
    parser.add_argument("--logs", default="out/tp_tokens", help="folder for what the engines print")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kill-worker", action="store_true", help="also the runs that end so")
    parser.add_argument("--own-process", action="store_true", help="also with vLLM's engine process")
    parser.add_argument("--runs", help=f"only these of {','.join(RUNS)}")
    parser.add_argument(
        "--out", help="a file for the JSON; what another call has put there is kept and judged with the rest"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_engine(args)
        return 0
    chosen = args.runs.split(",") if args.runs else list(RUNS)
    out = Path(args.out) if args.out else None
    runs: dict[str, dict[str, Any]] = json.loads(out.read_text())["runs"] if out and out.exists() else {}
    for label, how in RUNS.items():
        wanted = (args.own_process or "own_process" not in how) and (
            args.kill_worker or "kill_worker" not in how
        )
        if label in chosen and (wanted or args.runs):
            runs[label] = child(label, args, **how)
            found = verdicts(runs, args)
            outcome = {"ok": all(found.values()), "verdicts": found, "runs": runs}
            if out:
                out.write_text(json.dumps(outcome, indent=1))
            print(label, "status", runs[label]["status"], f"{runs[label]['seconds']:.0f} s", flush=True)
    found = verdicts(runs, args)
    for what, holds in found.items():
        print("ok  " if holds else "FAIL", what)
    shown = {label: digests(run) for label, run in runs.items()}
    print("TP_TOKENS", json.dumps({"ok": all(found.values()), "digests": shown}))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

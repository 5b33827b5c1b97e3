"""One vLLM engine on a GPU: token digests pass by pass, output tokens/s, GPU memory. Prints `RESULT {json}` lines.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 [ENABLE_KVCACHED=true] \\
        python bench/vllm_run.py --label native --size 1b --prefix-caching on

The same prompts are run `--passes` times, with a process for each setting of prefix caching. With
VLLM_ENABLE_V1_MULTIPROCESSING=0 native vLLM repeats itself pass by pass, so digests can be compared between
processes (docs/FIGURES.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import random
import sys
import threading
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))


class MemorySampler(threading.Thread):
    """The largest use of the whole device, in MiB, sampled at 4 Hz: each look is a driver call that the engine feels."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0
        self._stop_event = threading.Event()

    def run(self) -> None:
        while not self._stop_event.wait(0.25):
            self.peak_mib = max(self.peak_mib, used_mib())

    def finish(self) -> int:
        self._stop_event.set()
        self.join()
        return self.peak_mib


def used_mib() -> int:
    """Memory in use on the device, by all its users."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def say(**row: Any) -> None:
    print("RESULT " + json.dumps(row), flush=True)


def kv_state(llm: Any) -> dict[str, int] | None:
    """The pool of a kvcached engine in this process, None natively or under the peer."""
    core = llm.llm_engine.engine_core.engine_core
    ledger = getattr(core.scheduler.kv_cache_manager.block_pool, "ledger", None)
    if ledger is None:
        return None
    stats = ledger.pool.stats()
    return {
        key: stats[key]
        for key in ("used_bytes", "reserved_bytes", "mapped_bytes", "retired_pages", "quarantined_pages")
    }


def run(args: argparse.Namespace, model: str, base_mib: int) -> None:
    from vllm import LLM, SamplingParams

    caching = args.prefix_caching == "on"
    start = time.perf_counter()
    llm = LLM(
        model=model,
        load_format="dummy" if args.dummy else "auto",
        skip_tokenizer_init=True,
        gpu_memory_utilization=args.utilization if args.kv_gib is None else 0.05,
        kv_cache_memory_bytes=None if args.kv_gib is None else args.kv_gib << 30,
        max_model_len=args.max_model_len,
        enforce_eager=args.eager,
        enable_prefix_caching=caching,
        seed=0,
        disable_log_stats=True,
    )
    row = {"label": args.label, "size": args.size, "caching": caching}
    cache = llm.llm_engine.vllm_config.cache_config
    say(
        **row,
        event="start",
        seconds=round(time.perf_counter() - start, 1),
        used_mib=used_mib() - base_mib,
        num_gpu_blocks=cache.num_gpu_blocks,
        kv=kv_state(llm),
    )
    rng = random.Random(1)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(args.input_tokens)]}
        for _ in range(args.requests)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True, detokenize=False)
    warm = [
        {"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(args.input_tokens)]} for _ in range(8)
    ]
    llm.generate(warm, params, use_tqdm=False)
    for number in range(args.passes):
        sampler = MemorySampler()
        sampler.start()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        peak = sampler.finish()
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        say(
            **row,
            event="pass",
            number=number,
            digest=hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
            cached_tokens=cached,
            output_tokens_per_s=round(sum(map(len, tokens)) / seconds, 1),
            peak_mib=peak - base_mib,
            used_mib=used_mib() - base_mib,
            kv=kv_state(llm),
        )
        if args.tokens_out:
            path = pathlib.Path(args.tokens_out) / f"{args.label}-{'on' if caching else 'off'}-{number}.json"
            path.write_text(json.dumps(tokens))
    time.sleep(1.0)
    say(**row, event="idle", used_mib=used_mib() - base_mib, kv=kv_state(llm))
    if caching:
        say(
            **row,
            event="reset",
            ok=llm.reset_prefix_cache(),
            used_mib=used_mib() - base_mib,
            kv=kv_state(llm),
        )
    if args.kvctl and os.environ.get("ENABLE_KVCACHED"):
        from kvcached import _core

        _core.kvctl(["list"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--label", required=True)
    parser.add_argument("--size", default="1b")
    parser.add_argument(
        "--dummy", action="store_true", help="dummy weights: right for speed and memory, useless for tokens"
    )
    parser.add_argument("--prefix-caching", choices=["on", "off"], default="on")
    parser.add_argument("--utilization", type=float, default=0.5)
    parser.add_argument(
        "--kv-gib", type=int, help="size of the KV cache, instead of --utilization: several engines at once"
    )
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kvctl", action="store_true", help="show `kvctl list` once the passes are done")
    parser.add_argument("--tokens-out", help="folder for the tokens of every pass")
    args = parser.parse_args()
    import torch

    from demo import model as models

    torch.cuda.init()
    base_mib = used_mib()
    model = models.write(
        f"/tmp/kvcached-model-{args.size}{'-dummy' * args.dummy}",
        args.size,
        "bfloat16",
        weights=not args.dummy,
    )
    run(args, str(model), base_mib)


if __name__ == "__main__":
    main()

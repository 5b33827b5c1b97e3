"""Workers in processes of their own: one scheduler, the same pages on every rank, and an end whoever dies.

An engine of two ranks takes long to start, so that there are few of them, each for several tests.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import worker_side
from conftest import ELASTIC, Engine, Outcome, name_taken, plugin_installed, prompt, settings

from kvcached import _core
from kvcached.errors import KVCachedConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 1 << 20  # two blocks of 32 tokens
TWO_RANKS = {"tensor_parallel_size": 2, "enable_prefix_caching": True}
SHARED = prompt(99, 150)
#: Two passes; the second meets what the first has left in the prefix cache.
PASSES = [
    [prompt(i, 20 + 45 * i) for i in range(4)] + [SHARED + prompt(1, 30)],
    [SHARED + prompt(i, 20 + 10 * i) for i in range(2)] + [prompt(i, 20 + 45 * i) for i in range(2, 4)],
]
DEADLINE_S = 60


def run(engine: Engine) -> Outcome:
    """Both passes, from an empty prefix cache on."""
    assert engine.llm.reset_prefix_cache()
    outcome = Outcome()
    for prompts in PASSES:
        tokens, hits = engine.generate(prompts, max_tokens=12)
        outcome.tokens.append(tokens)
        outcome.hits.append(hits)
    return outcome


def ask(engine: Engine, question: Callable[..., Any], *args: Any) -> list[Any]:
    return engine.core.model_executor.collective_rpc(question, args=args)


def common_pages(engine: Engine) -> list[int]:
    """The pages that have memory, which must be the same on all ranks."""
    assert engine.pool.quiesce()
    first, *others = ask(engine, worker_side.mapped_pages)
    assert others == [first]
    return first


def are_gone(pids: list[int]) -> bool:
    """Waits for these processes to end."""
    deadline = time.monotonic() + DEADLINE_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def start(model_folder: str, env: dict[str, str], **arguments: Any) -> Engine:
    plugin_installed()
    with settings(**env):
        return Engine(model_folder, **TWO_RANKS | arguments)


@pytest.fixture(scope="module")
def native(model_folder: str) -> Outcome:
    engine = start(model_folder, {})
    outcome = run(engine)
    engine.shutdown()
    assert any(outcome.hits[1]), "the second pass meets the first one's prefixes"
    return outcome


@pytest.fixture(scope="module")
def elastic(model_folder: str) -> Iterator[Engine]:
    engine = start(model_folder, ELASTIC | {"KVCACHED_MAX_RESERVED_MB": "0", "KVCACHED_PAGE_MB": "1"})
    assert engine.is_elastic
    yield engine
    if hasattr(engine, "llm"):
        engine.shutdown()
    gc.collect()


def test_the_same_tokens_and_hits_as_natively(native, elastic):
    got = run(elastic)
    assert got.tokens == native.tokens
    assert got.hits == native.hits


def test_all_ranks_reserve_the_same(elastic):
    assert _core.live_ranges() == 0, "the scheduler's process has no memory of its own"
    first, second = ask(elastic, worker_side.geometry)
    assert first == second
    blocks = elastic.scheduler.cache_config.num_gpu_blocks
    rows = elastic.pool.id_space
    assert rows > blocks == elastic.pool.num_blocks
    assert ask(elastic, worker_side.counts) == [(blocks, rows, rows)] * 2


def test_memory_rises_and_falls_on_all_ranks_together(elastic, capfd):
    import vllm

    assert elastic.llm.reset_prefix_cache()
    assert common_pages(elastic) == [0], "nothing but the null block's page at rest"
    llm_engine = elastic.llm.llm_engine
    sampling = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for number, tokens in enumerate(PASSES[0]):
        llm_engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
    peak = 0
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
        pages = common_pages(elastic)
        assert elastic.pool.stats()["mapped_bytes"] == len(pages) * PAGE, "bytes are those of one rank"
        peak = max(peak, len(pages))
    assert peak > 6
    assert _core.kvctl(["list"]) == 0
    (row,) = [line for line in capfd.readouterr().out.splitlines() if f"vllm-{os.getpid()} " in line]
    assert " cpu x2 " in row
    assert elastic.llm.reset_prefix_cache()
    assert common_pages(elastic) == [0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_loses_its_pages_is_noticed(elastic, native, number):
    """What the comparison of tokens is worth."""
    schedule = elastic.scheduler.schedule
    steps = 0

    def forgetful(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 6:
            ask(elastic, worker_side.lose_pages, number)
        return schedule(*args)

    elastic.scheduler.schedule = forgetful
    try:
        got = run(elastic)
    finally:
        elastic.scheduler.schedule = schedule
    assert got.tokens != native.tokens
    assert run(elastic).tokens == native.tokens, "and whole again with an empty cache"


def test_a_layer_of_one_rank_shifted_by_a_block_is_noticed(elastic, native):
    """The last with this engine whose tokens count."""
    ask(elastic, worker_side.shift_a_layer, 1)
    assert run(elastic).tokens != native.tokens


def test_a_killed_worker_ends_the_engine_and_leaves_nothing(elastic):
    pids, addresses = ask(elastic, worker_side.process_id), ask(elastic, worker_side.address)
    assert all(Path(address).is_socket() for address in addresses)
    pool = elastic.pool
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"rank 1|cancelled|Executor failed"):
        for _ in range(100):
            elastic.generate(PASSES[0], max_tokens=12)
    assert time.monotonic() - begin < DEADLINE_S
    with pytest.raises(_core.StateConsistencyError, match="rank 1"):
        pool.reserve_demand(pool.backed_size() + 1)
    elastic.shutdown()
    assert are_gone(pids)
    assert not any(Path(address).exists() for address in addresses)


PROGRAM = """
import json, os, sys, vllm
if __name__ == "__main__":
    model, prompts = json.loads(sys.argv[1])
    llm = vllm.LLM(model=model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=True,
                   max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256, block_size=32,
                   enable_prefix_caching=True, seed=0, tensor_parallel_size=2)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in outputs]), flush=True)
    from kvcached import _core
    _core.kvctl(["list"])
    print("READY", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def outside(tmp_path, model_folder) -> Iterator[tuple[list[str], psutil.Process]]:
    """An engine as users have it, its scheduler in vLLM's engine process: what its front end said, and that process."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environ = {k: v for k, v in os.environ.items() if "KVCACHED" not in k}
    environ |= {
        "ENABLE_KVCACHED": "true",
        "KVCACHED_STRICT": "1",
        "KVCACHED_IPC_NAME": f"outside-{os.getpid()}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with subprocess.Popen(
        [sys.executable, str(program), json.dumps([model_folder, PASSES[0]])],
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as front_end:
        family = []
        try:
            said = list(itertools.takewhile(lambda line: line != "READY\n", front_end.stdout))
            family = psutil.Process(front_end.pid).children(recursive=True)
            (engine_core,) = {worker.parent() for worker in family if sockets_of(worker)}
            yield said, engine_core
        finally:
            front_end.kill()
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def sockets_of(process: psutil.Process) -> list[str]:
    """Paths of the sockets of ours at which a process listens."""
    return [c.laddr for c in process.net_connections(kind="unix") if "kvcached" in (c.laddr or "")]


def test_a_killed_scheduler_takes_its_workers_and_their_sockets_with_it(native, outside):
    """One variable is all that was set, and the memory is of the process with the scheduler in others' eyes."""
    said, engine_core = outside
    (tokens,) = [line for line in said if line.startswith("TOKENS ")]
    assert json.loads(tokens.removeprefix("TOKENS ")) == native.tokens[0]
    (row,) = [line for line in said if line.startswith(f"outside-{os.getpid()} ")]
    assert f" {engine_core.pid} " in row and " cpu x2 " in row
    workers = [worker for worker in engine_core.children() if sockets_of(worker)]
    sockets = [path for worker in workers for path in sockets_of(worker)]
    assert len(workers) == 2 and all(Path(path).is_socket() for path in sockets)
    engine_core.kill()
    assert are_gone([worker.pid for worker in workers])
    assert not any(Path(path).exists() for path in sockets)


def test_refused_late_it_runs_natively_on_all_ranks(native, model_folder, caplog):
    """Its workers exist, and have seen us: nothing of it may be left in them. And native repeats itself."""
    with name_taken("taken-name"):
        caplog.set_level(logging.WARNING, logger="kvcached")
        engine = start(model_folder, ELASTIC | {"KVCACHED_STRICT": "0", "KVCACHED_IPC_NAME": "taken-name"})
    assert not engine.is_elastic
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "kvcached"]
    assert "runs natively" in warning and "taken-name" in warning
    assert ask(engine, worker_side.is_elastic) == [False, False]
    again = run(engine)
    engine.shutdown()
    assert again == native


def test_workers_without_our_plug_in_are_refused_and_end(model_folder):
    """What `KVCACHED_AUTOPATCH=false` and `install()` come to, which does not reach them."""
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KVCachedConfigError, match="worker process in which kvcached's plug-in did not run"):
        start(model_folder, ELASTIC | {"KVCACHED_AUTOPATCH": "false"})
    gc.collect()
    assert are_gone([c.pid for c in psutil.Process().children() if c.pid not in before])

"""What becomes of worker processes: when the scheduler's is killed, and when the engine turns out to be one that we do not carry."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import worker_side
from conftest import ELASTIC, name_taken
from two_ranks import PASSES, are_gone, ask, run, start

from kvcached.errors import KVCachedConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def sockets_of(process: psutil.Process) -> list[Path]:
    """The sockets of ours at which a process listens. They are bound under another name than they have when they can be reached."""
    bound = [c.laddr for c in process.net_connections(kind="unix") if "kvcached" in (c.laddr or "")]
    return [path for each in bound for path in Path(each).parent.glob(f"r{process.pid}-*.sock")]


def test_a_killed_scheduler_takes_its_workers_and_their_sockets_with_it(native_on_two_ranks, outside):
    """One variable is all that was set, and the memory is of the process with the scheduler in others' eyes."""
    said, engine_core = outside
    (tokens,) = [line for line in said if line.startswith("TOKENS ")]
    assert json.loads(tokens.removeprefix("TOKENS ")) == native_on_two_ranks.tokens[0]
    (row,) = [line for line in said if line.startswith(f"outside-{os.getpid()} ")]
    assert f" {engine_core.pid} " in row and " cpu x2 " in row
    workers = [worker for worker in engine_core.children() if sockets_of(worker)]
    sockets = [path for worker in workers for path in sockets_of(worker)]
    assert len(workers) == 2 and len(set(sockets)) == 2 and all(path.is_socket() for path in sockets)
    engine_core.kill()
    assert are_gone([worker.pid for worker in workers])
    assert not any(path.exists() for path in sockets)


def test_refused_late_it_runs_natively_on_all_ranks(native_on_two_ranks, model_folder, caplog):
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
    assert again == native_on_two_ranks


def test_workers_without_our_plug_in_are_refused_and_end(model_folder):
    """What `KVCACHED_AUTOPATCH=false` and `install()` come to, which does not reach them."""
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KVCachedConfigError, match="worker process in which kvcached's plug-in did not run"):
        start(model_folder, ELASTIC | {"KVCACHED_AUTOPATCH": "false"})
    gc.collect()
    assert are_gone([c.pid for c in psutil.Process().children() if c.pid not in before])

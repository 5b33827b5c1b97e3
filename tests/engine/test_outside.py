"""What a user does: sets `ENABLE_KVCACHED=true` and starts an engine, which runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import prompt
from prometheus_client.parser import text_string_to_metric_families

from kvcached import _core
from kvcached.integration.vllm import interfaces

PROGRAM = """
import importlib, json, os, sys
if "TEST_IMPORT" in os.environ:
    importlib.import_module(os.environ["TEST_IMPORT"])
import vllm
from kvcached import _core

if __name__ == "__main__":
    model, prompts = json.loads(sys.argv[1])
    llm = vllm.LLM(model=model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=True,
                   max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256, block_size=32,
                   enable_prefix_caching=True, seed=0)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in outputs]), flush=True)
    from fastapi import FastAPI
    from starlette.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router
    app = FastAPI()
    attach_router(app)
    attach_router(app)
    print("METRICS", json.dumps(TestClient(app).get("/metrics").text), flush=True)
    print("LIST", flush=True)
    _core.kvctl(["list"])
"""


@pytest.fixture
def outside(tmp_path, model_folder):
    """Runs the program with these variables; returns its tokens, and what `kvctl list` and its /metrics showed meanwhile."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(prompts: list[list[int]], **variables: str) -> tuple[list[list[int]], list[str], str]:
        environ = {k: v for k, v in os.environ.items() if "KVCACHED" not in k} | variables
        result = subprocess.run(
            [sys.executable, str(program), json.dumps([model_folder, prompts])],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        lines = result.stdout.splitlines()
        (tokens,) = [line for line in lines if line.startswith("TOKENS ")]
        (metrics,) = [line for line in lines if line.startswith("METRICS ")]
        listed = lines[lines.index("LIST") + 1 :]
        return (
            json.loads(tokens.removeprefix("TOKENS ")),
            listed,
            json.loads(metrics.removeprefix("METRICS ")),
        )

    return run


# "01": one to vLLM's client, which starts EngineCore in a process of its own, and not the "1" for which the CPU platform
# puts the worker into a third one. On a GPU "1" means two processes.
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "01"}
# vLLM loads no plug-ins, and `kvcached_hooks.pth` (which an editable install has not) is what is left.
NO_PLUGINS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "none",
    "TEST_IMPORT": "kvcached.autopatch",
}


@pytest.mark.parametrize("how", [OWN_PROCESS, NO_PLUGINS], ids=["own-process", "no-plug-ins"])
def test_one_variable_is_all(outside, native, how, capfd):
    prompts = [prompt(i, 30 + 40 * i) for i in range(4)]
    expected, _ = native(enable_prefix_caching=True).generate(prompts, max_tokens=16)
    name = f"outside-{os.getpid()}"
    tokens, listed, metrics = outside(
        prompts,
        ENABLE_KVCACHED="true",
        KVCACHED_STRICT="1",
        KVCACHED_IPC_NAME=name,
        KVCACHED_PAGE_MB="2",
        **how,
    )
    assert tokens == expected
    (row,) = [line for line in listed if line.startswith(name)]
    assert " vllm 0." in row and " cpu " in row
    shown = {family.name: family for family in text_string_to_metric_families(metrics)}
    (mapped,) = shown["kvcached_mapped_pages"].samples
    assert (mapped.name, mapped.labels["instance"]) == ("kvcached_mapped_pages_total", name)
    assert mapped.value >= 1
    times = {sample.labels.get("le"): sample.value for sample in shown["kvcached_map_seconds"].samples}
    assert times["+Inf"] >= 1
    assert shown["kvcached_virtual_bytes"].samples[0].value > 0
    _core.kvctl(["list"])
    assert name not in capfd.readouterr().out, "the record ends with its process"


def test_snapshot_and_shutdown(elastic):
    assert interfaces.observability_snapshot() == []
    engine = elastic()
    engine.generate([prompt(1, 40)], max_tokens=4)
    (snapshot,) = interfaces.observability_snapshot()
    assert snapshot["engine"].startswith("vllm 0.")
    assert (snapshot["device"], snapshot["num_buffers"]) == ("cpu", engine.pool.geometry.num_buffers)
    assert snapshot["held_blocks"] == 1
    ftensor = engine.pool.ftensor
    interfaces.shutdown_kvcached()
    interfaces.shutdown_kvcached()
    assert interfaces.observability_snapshot() == []
    assert ftensor.mapped_bytes == 0

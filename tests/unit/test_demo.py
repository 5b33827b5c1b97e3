"""The demo's arithmetic, its verdict and its adapters, without an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from demo import model, report, worker, workload
from demo.__main__ import judge, options
from demo.engine import MODEL_LEN, Engine, Job
from demo.engines import ENGINES, sglang, vllm
from demo.run import Burst, Run, Sample, environment_of
from demo.workload import Request

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def story(*, elastic: bool, tokens: list[list[int]]) -> Run:
    burst = Burst(0.0, 2.0, tokens, peak_bytes=300 * MIB, after_pause_bytes=80 * MIB)
    samples = [Sample(0.0, 200 * MIB, 100 * MIB, 2048 * MIB)]
    return Run("vllm", elastic, prefix_caching=False, bursts=[burst], samples=samples, rest_bytes=16 * MIB)


@pytest.fixture
def same() -> tuple[Run, Run]:
    return story(elastic=False, tokens=[[1, 2], [3, 4]]), story(elastic=True, tokens=[[1, 2], [3, 4]])


@pytest.fixture
def different() -> tuple[Run, Run]:
    return story(elastic=False, tokens=[[1, 2], [3, 4]]), story(elastic=True, tokens=[[1, 2], [3, 5]])


def test_the_same_arguments_give_the_same_requests_of_mixed_lengths() -> None:
    first, second, third = workload.bursts(3, 14, max_prompt=800, max_output=96)
    assert first == third != second
    assert all(len(request.prompt) < 800 and 24 <= request.max_tokens <= 96 for request in first)
    assert len({len(request.prompt) for request in first}) > 7
    # Every second prompt starts with the prefix that they share, and goes on differently.
    shared = {tuple(request.prompt[:400]) for request in first[1::2]}
    assert len(shared) == 1
    assert len({tuple(request.prompt) for request in first}) == 14


def test_the_table_shows_speed_and_memory(same: tuple[Run, Run]) -> None:
    shown = report.table([same])
    assert "yes, all 2 requests" in shown
    assert "(1.00x)" in shown
    for text in ("16 MiB", "300 MiB", "80 MiB", "2.00 GiB"):
        assert text in shown


def test_equal_tokens_pass(same: tuple[Run, Run]) -> None:
    assert judge([same], []) == 0


def test_different_tokens_fail_on_a_cpu_and_say_where(
    different: tuple[Run, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "NO: 1 of 2 requests differ" in report.table([different])
    assert judge([different], []) == 1
    assert (
        "burst 1, request 2 parts at output token 2 of 2: native [4], kvcached [5]" in capsys.readouterr().err
    )


def test_on_a_gpu_native_is_the_judge(same: tuple[Run, Run], different: tuple[Run, Run]) -> None:
    assert judge([different], [same]) == 1
    assert judge([different], [different]) == 0


def job_of(engine: str, **other: Any) -> Job:
    chosen: dict[str, Any] = {
        "device": "cpu",
        "prefix_caching": False,
        "bursts": 3,
        "requests": 2,
        "pause_s": 0.0,
    } | other
    return Job(engine, "nowhere", "tiny", **chosen)


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the stand-ins below generate: other tokens for each prompt."""
    return [sum(prompt) * (at + 1) for at in range(count)]


class StandInVLLM:
    """`vllm.LLM` as far as the adapter uses it: 128 blocks of 16 KiB in each of 4 layers, in two groups."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.flushes = arguments, 0
        groups = [
            SimpleNamespace(
                kv_cache_spec=SimpleNamespace(page_size_bytes=16384), layer_names=["a", "b", "c"]
            ),
            SimpleNamespace(kv_cache_spec=SimpleNamespace(page_size_bytes=16384), layer_names=["d"]),
        ]
        cache = SimpleNamespace(num_blocks=128, kv_cache_groups=groups)
        scheduler = SimpleNamespace(kv_cache_config=cache)
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        )

    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[Any], *, use_tqdm: bool
    ) -> list[Any]:
        assert not use_tqdm
        answers = []
        for prompt, wanted in zip(prompts, params, strict=True):
            assert wanted.temperature == 0.0
            assert wanted.ignore_eos
            tokens = continuation(prompt["prompt_token_ids"], wanted.max_tokens)
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens))]))
        return answers

    def reset_prefix_cache(self) -> bool:
        self.flushes += 1
        return True


class StandInSGLang:
    """`sglang.Engine` as far as the adapter uses it: 256 tokens, and busy when first asked to flush."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.flushes, self.running = arguments, 0, True

    def get_server_info(self) -> dict[str, Any]:
        return {"max_total_num_tokens": 256, "max_total_tokens": 1}

    def generate(self, *, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[Any]:
        answers = []
        for prompt, wanted in zip(input_ids, sampling_params, strict=True):
            assert wanted["temperature"] == 0.0
            assert wanted["ignore_eos"]
            answers.append({"output_ids": continuation(prompt, wanted["max_new_tokens"])})
        return answers

    def flush_cache(self) -> SimpleNamespace:
        self.flushes += 1
        return SimpleNamespace(success=self.flushes > 1)

    def shutdown(self) -> None:
        self.running = False


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    packages: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": StandInVLLM, "SamplingParams": SimpleNamespace},
        "sglang": {"Engine": StandInSGLang},
    }
    for name, parts in packages.items():
        module = ModuleType(name)
        vars(module).update(parts, __version__=f"1.2-{name}")
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_engine_answers_each_request_in_order_and_to_its_full_length(name: str) -> None:
    requests = [Request([3, 4, 5], 4), Request([9], 7), Request([6, 6], 1)]
    tokens = ENGINES[name](job_of(name)).generate(requests)
    assert tokens == [continuation(request.prompt, request.max_tokens) for request in requests]
    assert all(type(answer) is list for answer in tokens)  # they go through JSON


def test_an_engine_says_its_version_and_what_its_kv_cache_holds(name: str) -> None:
    engine = ENGINES[name](job_of(name))
    assert engine.version == f"1.2-{name}"
    assert engine.kv_cache_bytes == 8 * MIB


def test_bytes_of_a_token_are_those_of_the_model_that_is_written(tmp_path: Path) -> None:
    for size in model.SHAPES:
        folder = model.write(tmp_path / size, size, weights=False)
        config = json.loads((folder / "config.json").read_text())
        elements = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        assert model.kv_bytes_per_token(size, "float32") == 4 * elements
        assert model.kv_bytes_per_token(size, "bfloat16") == 2 * elements


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prefix_caching_and_the_length_mean_the_same_to_both(device: str) -> None:
    for caching in (False, True):
        ours = vllm.arguments(job_of("vllm", device=device, prefix_caching=caching))
        theirs = sglang.arguments(job_of("sglang", device=device, prefix_caching=caching))
        assert ours["enable_prefix_caching"] is caching
        assert theirs["disable_radix_cache"] is not caching
        assert ours["dtype"] == theirs["dtype"]
        assert ours["max_model_len"] == theirs["context_length"] == MODEL_LEN[device]


def test_both_have_as_much_kv_cache_on_a_cpu() -> None:
    given = int(environment_of(job_of("vllm"))["VLLM_CPU_KVCACHE_SPACE"]) << 30
    tokens = sglang.arguments(job_of("sglang"))["max_total_tokens"]
    assert tokens * model.kv_bytes_per_token("tiny", "float32") == given


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_request_fits_the_length(device: str) -> None:
    bursts = worker.workload_of(job_of("vllm", device=device, requests=64))
    longest = max(len(request.prompt) + request.max_tokens for burst in bursts for request in burst)
    assert MODEL_LEN[device] // 2 < longest <= MODEL_LEN[device]


def test_the_environment_is_the_engines_and_the_users_prevails(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    monkeypatch.setenv("KVCACHED_STRICT", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device in ("cpu", "cuda"):
        environment = environment_of(job_of(name, device=device))
        assert environment.items() >= ENGINES[name].environment(device).items()
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["HF_HUB_OFFLINE"] == "0"
        assert environment["PATH"] == os.environ["PATH"]
        # A native engine is native, and the elastic one has no settings but the demo's.
        assert [key for key in environment if "KVCACHED" in key] == []
        # Every kernel of a GPU would be interpreted.
        assert device == "cpu" or "TRITON_INTERPRET" not in environment


def test_sglang_is_asked_again_until_it_has_emptied_its_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sglang.SGLang(job_of("sglang"))
    engine.forget()
    assert engine._engine.flushes == 2
    monkeypatch.setattr(sglang, "FORGET_LIMIT_S", 0.0)
    monkeypatch.setattr(StandInSGLang, "flush_cache", lambda _: SimpleNamespace(success=False))
    with pytest.raises(RuntimeError, match="prefix cache"):
        engine.forget()


def test_vllm_that_keeps_its_prefix_cache_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm.VLLM(job_of("vllm"))
    engine.forget()
    assert engine._llm.flushes == 1
    monkeypatch.setattr(StandInVLLM, "reset_prefix_cache", lambda _: False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        engine.forget()


def test_sglang_ends_its_processes() -> None:
    engine = sglang.SGLang(job_of("sglang"))
    assert engine._engine.running
    engine.close()
    assert not engine._engine.running


def test_the_demo_starts_where_no_engine_is_installed() -> None:
    script = (
        "import sys; import demo.__main__, demo.worker; print({'vllm', 'sglang', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_command_takes_the_engines_and_no_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--engine", name])
    assert options().engine == name
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert options().engine == "vllm"
    monkeypatch.setattr(sys, "argv", ["demo", "--engine", "other"])
    with pytest.raises(SystemExit):
        options()


class Witness(Engine):
    """Notes what the worker does, among the events that it reports."""

    title = "Witness"
    version = "3"
    kv_cache_bytes = 5
    last: Witness

    def __init__(self, job: Job) -> None:
        self.happened: list[str] = []
        type(self).last = self

    @staticmethod
    def environment(device: str) -> dict[str, str]:
        return {}

    def generate(self, requests: list[Request]) -> list[list[int]]:
        self.happened.append("generate")
        return [continuation(request.prompt, request.max_tokens) for request in requests]

    def forget(self) -> None:
        self.happened.append("forget")

    def close(self) -> None:
        self.happened.append("close")


def test_the_worker_warms_up_forgets_and_reports_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, ...]] = []
    monkeypatch.setitem(ENGINES, "witness", Witness)
    monkeypatch.setattr(worker, "SETTLE_S", 0.0)
    monkeypatch.setattr(model, "write", lambda *what: written.append(what))
    job = job_of("witness")
    reader, writer = os.pipe()
    worker.main(job, writer)
    with os.fdopen(reader) as pipe:
        events = [json.loads(line) for line in pipe]
    burst = ["burst", "burst_done", "paused"]
    assert [event["event"] for event in events] == ["started", "rest", *burst, *burst, *burst, "finished"]
    assert (events[0]["version"], events[0]["kv_cache_bytes"]) == ("3", 5)
    assert written == [("nowhere", "tiny", "float32")]
    assert Witness.last.happened == ["generate", "forget", "generate", "generate", "generate", "close"]
    expected = worker.workload_of(job)[1]
    assert events[6]["tokens"] == [continuation(one.prompt, one.max_tokens) for one in expected]

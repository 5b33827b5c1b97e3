"""What kvcached does not carry is named; the engine then runs natively, or does not start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.version
from conftest import ELASTIC, Engine, name_taken, plugin_installed, prompt, settings

from kvcached import _core, control, instance
from kvcached.errors import GeometryError, KVCachedConfigError, TermsError
from kvcached.integration.patching import SeamError
from kvcached.integration.refusal import UnsupportedConfiguration
from kvcached.integration.vllm import plugin, seams


@pytest.fixture(autouse=True)
def installed():
    plugin_installed()
    yield
    assert _core.live_ranges() == 0


@pytest.fixture
def kvcached_log(caplog):
    caplog.set_level(logging.WARNING, logger="kvcached")
    return caplog


def start(model_folder: str, env: dict[str, str], **arguments) -> Engine:
    with settings(**ELASTIC | env):
        return Engine(model_folder, **arguments)


def refused(
    model_folder: str, error: type[Exception], message: str, env: dict[str, str] | None = None, **arguments
):
    with pytest.raises(error, match=message):
        start(model_folder, env or {}, **arguments)


def runs_natively(
    model_folder: str, native_outcome_tokens, log, message: str, env: dict[str, str], **arguments
):
    engine = start(model_folder, {"KVCACHED_STRICT": "0"} | env, **arguments)
    try:
        assert not engine.is_elastic
        warnings = [
            r.getMessage() for r in log.records if r.name == "kvcached" and r.levelno >= logging.WARNING
        ]
        assert len(warnings) == 1
        assert "runs natively" in warnings[0]
        assert message in warnings[0]
        tokens, _ = engine.generate([prompt(1, 60)], max_tokens=8)
        assert native_outcome_tokens is None or tokens[0] == native_outcome_tokens
    finally:
        engine.shutdown()


@pytest.fixture
def sliding_window_model(model_folder, tmp_path) -> str:
    config = json.loads(Path(model_folder, "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(Path(model_folder, "model.safetensors"))
    return str(tmp_path)


def test_sliding_window_is_refused_after_loading(sliding_window_model):
    refused(
        sliding_window_model,
        UnsupportedConfiguration,
        r"layers\.0\.self_attn.*SlidingWindowSpec is not supported yet",
    )


def test_sliding_window_runs_natively(sliding_window_model, kvcached_log):
    runs_natively(sliding_window_model, None, kvcached_log, "SlidingWindowSpec is not supported yet", {})


def test_speculative_decoding(model_folder):
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    refused(model_folder, UnsupportedConfiguration, "speculative decoding", speculative_config=ngram)


def test_pipeline_stages(model_folder):
    refused(model_folder, UnsupportedConfiguration, "pipeline parallelism of 2", pipeline_parallel_size=2)


def test_another_executor(model_folder):
    executor = "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher"
    refused(
        model_folder,
        UnsupportedConfiguration,
        "executor ExecutorWithExternalLauncher",
        distributed_executor_backend=executor,
    )


@pytest.mark.skipif(vllm.version.__version__.startswith("0.26"), reason="not in this version's CPU build")
def test_quantised_cache(model_folder):
    refused(model_folder, UnsupportedConfiguration, r"quantisation \(FP8_PER_TENSOR\)", kv_cache_dtype="fp8")


def test_ids_over_int32(model_folder):
    refused(model_folder, GeometryError, "2\\^31|int32", num_gpu_blocks_override=1 << 27)


def test_unknown_version(model_folder, monkeypatch, kvcached_log):
    native = start(model_folder, {"ENABLE_KVCACHED": "false"})
    expected = native.generate([prompt(1, 60)], max_tokens=8)[0][0]
    native.shutdown()
    monkeypatch.setattr(vllm.version, "__version__", "0.31.0")
    refused(model_folder, SeamError, "vllm 0.31.0 is not supported: use >=0.26,<0.27 or >=0.29,<0.30")
    runs_natively(model_folder, expected, kvcached_log, "vllm 0.31.0 is not supported", {})


def test_malformed_setting(model_folder, kvcached_log):
    refused(model_folder, KVCachedConfigError, "KVCACHED_PAGE_MB", {"KVCACHED_PAGE_MB": "many"})
    runs_natively(model_folder, None, kvcached_log, "KVCACHED_PAGE_MB", {"KVCACHED_PAGE_MB": "many"})


def test_strictness_that_is_not_understood_is_strict(model_folder):
    refused(model_folder, KVCachedConfigError, "KVCACHED_STRICT", {"KVCACHED_STRICT": "perhaps"})


def test_name_that_is_taken(model_folder, kvcached_log):
    """Late: the worker has loaded the model. Nothing of us may be left in it."""
    with name_taken("taken-name"):
        env = {"KVCACHED_IPC_NAME": "taken-name"}
        refused(model_folder, KVCachedConfigError, "taken-name", env)
        runs_natively(model_folder, None, kvcached_log, "taken-name", env)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"KVCACHED_LIMIT": "3M"}, "KVCACHED_LIMIT .* is below what an engine needs to start"),
        ({"KVCACHED_DEVICE_BUDGET": "64M"}, "the budget of host is 33554432 bytes"),
        ({"KVCACHED_MIN": "24M"}, "a minimum of 25165824 bytes does not fit host"),
    ],
)
def test_terms_that_cannot_be_kept_end_the_start(model_folder, terms, message):
    """Natively it would take the memory that others live by."""
    instance.discard_record()  # of this process's engines before
    neighbour = _core.InstanceRecord("test-neighbour", "test", "cpu", min_bytes=16 << 20)
    try:
        neighbour.share([instance.hardware("cpu")], budget_bytes=32 << 20)
        refused(model_folder, TermsError, message, {"KVCACHED_STRICT": "0"} | terms)
        assert not instance.has_record()
        assert [each.name for each in control.instances()] == ["test-neighbour"]
    finally:
        neighbour.close()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_all_seams_of_the_installed_version(device_type):
    """Also those of the GPU worker: the CPU build carries its modules."""
    version = vllm.version.__version__
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    in_place = [
        each for each in plugin.patch_sets(version, config, scheduler=True, worker=True) if each.applied
    ]
    for each in in_place:
        each.restore()
    try:
        seams.scheduler_set(version).verify(version)
        seams.worker_set(version, device_type).verify(version)
    finally:
        for each in in_place:
            each.apply()


@pytest.mark.parametrize("version", ["0.25.1", "0.27.1", "0.28.0", "0.30.0", "1.0", "dev"])
def test_versions_that_are_not_carried(version):
    with pytest.raises(SeamError, match="is not supported: use"):
        seams.scheduler_set(version)
    with pytest.raises(SeamError, match="is not supported: use"):
        seams.worker_set(version, "cuda")

"""`kvcached.doctor`: what stands in an engine's way, and what to do about it."""

from __future__ import annotations

import json
import os
import sys
import types
from typing import TYPE_CHECKING

import pytest

from kvcached import _core
from kvcached.doctor import engines, machine, model
from kvcached.doctor.__main__ import main
from kvcached.integration.patching import PatchSet, Seam, Versions

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.doctor.finding import Finding

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if "KVCACHED" in variable:
            monkeypatch.delenv(variable)


def by_topic(findings: object) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}  # type: ignore[attr-defined]


def test_a_switch_that_is_off_is_a_problem_and_the_advice_switches_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    off = by_topic(machine.settings())["switch"]
    assert off.level == "problem"
    variable, _, value = off.advice.removeprefix("set ").partition("=")
    monkeypatch.setenv(variable, value)
    assert by_topic(machine.settings())["switch"].level == "ok"
    monkeypatch.setenv("KVCACHED_AUTOPATCH", "false")
    assert by_topic(machine.settings())["switch"].level == "note"


def test_a_setting_that_is_not_accepted_is_said_as_an_engine_would_say_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCACHED_PAGE_MB", "many")
    (found,) = machine.settings()
    assert found.level == "problem" and "KVCACHED_PAGE_MB='many'" in found.text
    monkeypatch.setenv("KVCACHED_PAGE_MB", "32")
    assert "KVCACHED_PAGE_MB=32" in by_topic(machine.settings())["settings"].text


def test_this_machines_memory_is_shown() -> None:
    found = by_topic(machine.devices())
    assert found["cpu"].level == "ok" and found["cpu"].text.startswith("host: ")
    assert f"{_core.granularity('cpu') >> 10} KiB" in found["cpu"].text


def test_no_entry_point_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    assert by_topic(machine.installation())["plug-ins"].level == "problem"


def fake_engine(monkeypatch: pytest.MonkeyPatch, version: str) -> types.ModuleType:
    module = types.ModuleType("an_engine")
    exec("def step(self, batch): ...\ndef end(self): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, "an_engine", module)
    versions = Versions("1.0", "1.1")
    seams = [
        Seam("an_engine:step", None, ("self", "batch"), versions, "steps"),
        Seam("an_engine:end", None, ("self",), versions, "ends"),
    ]
    monkeypatch.setattr(engines, "installed", lambda name: version)
    monkeypatch.setattr(engines, "patch_sets", lambda name, version: [PatchSet(name, seams)])
    return module


def test_seams_that_are_as_known_are_counted_and_listed_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine(monkeypatch, "1.0.3")
    found = list(engines.engine("vllm", asked=True))
    assert [f.text for f in found if f.topic == "vllm seam"] == [
        "an_engine:step: relied on: steps",
        "an_engine:end: relied on: ends",
    ]
    assert by_topic(found)["vllm 1.0.3"].text == "supported, 2 of 2 seams as known"
    assert not [f for f in engines.engine("vllm", asked=False) if f.topic == "vllm seam"]


def test_every_seam_that_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_engine(monkeypatch, "1.0.3")
    del module.end
    exec("def step(self, other): ...", module.__dict__)
    problems = [f.text for f in engines.engine("vllm", asked=False) if f.level == "problem"]
    assert len(problems) == 2
    assert "expected parameters (self, batch), found (self, other)" in problems[0]
    assert "there is no end" in problems[1]
    fake_engine(monkeypatch, "2.0")
    assert len([f for f in engines.engine("vllm", asked=False) if f.level == "problem"]) == 2


def test_an_engine_that_is_not_there_is_a_problem_only_for_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "installed", lambda name: None)
    assert [f.level for f in engines.engine("sglang", asked=False)] == ["note"]
    assert [f.level for f in engines.engine("sglang", asked=True)] == ["problem"]


def test_the_pages_of_a_model_are_those_that_an_engine_gets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = by_topic(model.geometry(str(tmp_path), "cpu", ranks=2, block_tokens=16))
    solved = _core.Geometry.solve(
        64, 16 * 4 * 128 * 2, _core.granularity("cpu"), tokens_per_block=16, layout="chunked"
    )
    assert found["pages, chunked"].text == solved.explain()
    assert "per-layer" in found["pages, per-layer"].text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"dtype": "int4"}, "int4"),
        ({"num_hidden_layers": None}, "TypeError"),
    ],
)
def test_a_model_that_is_not_carried_is_a_problem(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    (found,) = model.geometry(str(tmp_path), "cpu", ranks=1, block_tokens=16)
    assert found.level == "problem" and said in found.text
    (found,) = model.geometry(str(tmp_path / "nowhere"), "cpu", ranks=1, block_tokens=16)
    assert found.level == "problem" and "nowhere" in found.text


def test_the_command_says_by_its_exit_code_whether_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine(monkeypatch, "1.0.3")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [types.SimpleNamespace(name="kvcached")]
    )
    assert main(["--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["problems"] == 1
    assert [f["topic"] for f in shown["findings"] if f["level"] == "problem"] == ["switch"]
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    assert main(["vllm"]) == 0
    assert "0 problems" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--block-size", "0"])
    assert ended.value.code == 2

"""The command that proves kernels, on vLLM's CPU backend over real memory, and that its verdicts can fail."""

from __future__ import annotations

import json
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import vllm
from vllm import envs

from kvcached import kernel_records
from kvcached.verify_kernels import child, proof
from kvcached.verify_kernels.__main__ import judge, main
from kvcached.verify_kernels.outcome import CONTROLS, HOLES, TOP_IDS, Ended, Outcome, read
from kvcached.verify_kernels.subject import UntestedError
from kvcached.verify_kernels.vllm import Vllm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.kernel_records import KernelRecord
    from kvcached.verify_kernels.cases import Shape
    from kvcached.verify_kernels.subject import Inputs


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without records."""
    # First: what vLLM keeps of models there takes it 15 s to find out anew.
    monkeypatch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvcached" / "kernels.json"


def command(*arguments: str) -> int:
    return main(["--device", "cpu", *arguments])


def test_the_cpu_backend_is_proven_and_recorded(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    assert command("--engine", "vllm", "--quick", "--json", str(results)) == 0
    record = kernel_records.lookup("vllm", vllm.__version__, "CPU_ATTN", "cpu", kernel_records.this_machine())
    assert record is not None
    assert record.hole_safe
    assert record.top_ids
    assert record.cases > 40
    assert record.machine == kernel_records.this_machine()
    assert json.loads(cache.read_text()) == [record.to_json()]
    assert json.loads(results.read_text()) == [record.to_json()]
    assert "CPU_ATTN: holes: passed" in capsys.readouterr().err
    assert command("--list") == 0
    assert kernel_records.this_machine() in capsys.readouterr().out


def test_controls_get_the_verdicts_that_they_must_get(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    assert command("--self-test", "--quick", "--json", str(results)) == 0
    assert "self-test passed" in capsys.readouterr().err
    verdicts = {entry["backend"]: entry for entry in json.loads(results.read_text())}
    assert set(verdicts) == set(CONTROLS)
    assert "SIGSEGV in decode" in verdicts["reads_stale_entries"]["detail"]
    assert not cache.exists()


def test_a_backend_that_cannot_run_here_is_not_recorded(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UntestedError, match=r"takes none of the shapes: .* vLLM chooses CPU_ATTN here"):
        Vllm("FLASH_ATTN", "cpu")
    with pytest.raises(UntestedError, match="only FLASH_ATTN has versions"):
        Vllm("TRITON_ATTN/2", "cpu")
    with pytest.raises(UntestedError, match="runs on cpu, not on cuda"):
        Vllm("FLASH_ATTN", "cuda:0")
    with pytest.raises(UntestedError, match="has no backend NONSENSE"):
        Vllm("NONSENSE", "cpu")

    def child_reports(engine: str, backend: str, phases: Any, options: Any, outcome: Outcome) -> None:
        outcome.untested = "not installed: no module x"

    monkeypatch.setattr("kvcached.verify_kernels.__main__._run", child_reports)
    assert command("--engine", "vllm") == 3
    assert "not tested: not installed: no module x" in capsys.readouterr().out
    assert json.loads(cache.read_text()) == []


def test_what_is_wrong_with_a_call_is_said(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command("--engine", "tensorrt")
    assert refused.value.code == 2
    with pytest.raises(SystemExit) as refused:
        main(["--device", "gpu"])
    assert refused.value.code == 2
    cache.parent.mkdir()
    cache.write_text("{")
    assert command("--engine", "vllm") == 2
    assert str(cache) in capsys.readouterr().err


def _forked(change: Callable[[], None], phase: str, folder: Path) -> KernelRecord:
    """The verdict on CPU_ATTN, quick, one phase, after `change` in its process, which is a fork of this one."""
    report = folder / "report"
    report.touch()

    def run() -> None:
        change()
        child.main(["vllm", "CPU_ATTN", "cpu", str(report), "quick", phase])

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    found = Outcome()
    read(report.read_text().splitlines(), Ended(process.exitcode), found)
    record = judge("vllm", "CPU_ATTN", found).record
    assert record is not None, found.untested
    return record


def test_a_real_kernel_that_looks_behind_a_sequence_dies(tmp_path: Path) -> None:
    """Proof that stale entries point at nothing: the kernel is told of a block more than there is."""

    def longer(*arguments: Any) -> Inputs:
        inputs = made(*arguments)
        inputs.seq_lens.add_(inputs.batch.shape.block_tokens)
        return inputs

    made = proof._inputs
    record = _forked(lambda: setattr(proof, "_inputs", longer), HOLES, tmp_path)
    assert not record.hole_safe
    assert "SIGSEGV" in record.detail


def test_a_real_kernel_that_reads_another_row_differs(tmp_path: Path) -> None:
    """Proof that the comparison sees the highest rows: the sparse view begins a block late."""
    opened = Vllm.open

    def shifted(self: Vllm, shape: Shape, layers: Any, num_rows: int) -> Any:
        if num_rows > 1 << 16:
            layers = [[buffer[self.block_bytes(shape) :]] for (buffer,) in layers]
            num_rows -= 1
        return opened(self, shape, layers, num_rows)

    record = _forked(lambda: setattr(Vllm, "open", shifted), TOP_IDS, tmp_path)
    assert not record.top_ids

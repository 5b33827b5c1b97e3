"""The command that proves kernels, on SGLang's CPU backend over real memory, and that its verdicts can fail."""

from __future__ import annotations

import json
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import sglang
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from kvcached import kernel_records
from kvcached.verify_kernels import child
from kvcached.verify_kernels import sglang as sglang_subject
from kvcached.verify_kernels.__main__ import judge, main
from kvcached.verify_kernels.cases import Shape
from kvcached.verify_kernels.outcome import HOLES, Ended, Outcome, read
from kvcached.verify_kernels.subject import UntestedError

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.verify_kernels.subject import Inputs


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without records."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvcached" / "kernels.json"


def test_the_cpu_backend_is_proven_and_recorded(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--engine", "sglang", "--quick"]) == 0
    record = kernel_records.lookup(
        "sglang", sglang.__version__, "torch_native", "cpu", kernel_records.this_machine()
    )
    assert record is not None
    assert record.hole_safe
    assert record.top_ids
    assert record.cases > 40
    assert json.loads(cache.read_text()) == [record.to_json()]
    assert "torch_native: holes: passed" in capsys.readouterr().err


def test_a_backend_that_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UntestedError, match="has no backend nonsense"):
        sglang_subject.Sglang("nonsense", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UntestedError, match="TRITON_INTERPRET"):
        sglang_subject.Sglang("triton", "cpu")


def test_a_real_backend_that_looks_behind_a_sequence_dies(tmp_path: Path) -> None:
    """Proof that stale entries point at nothing: the backend is told of a page more than there is."""
    made = sglang_subject._Opened._forward_batch
    report = tmp_path / "report"
    report.touch()

    def longer(self: Any, inputs: Inputs) -> Any:
        batch = made(self, inputs)
        batch.seq_lens += inputs.batch.shape.block_tokens
        return batch

    def run() -> None:
        sglang_subject._Opened._forward_batch = longer  # type: ignore[method-assign]
        child.main(["sglang", "torch_native", "cpu", str(report), "quick", HOLES])

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    found = Outcome()
    read(report.read_text().splitlines(), Ended(process.exitcode), found)
    record = judge("sglang", "torch_native", found).record
    assert record is not None, found.untested
    assert not record.hole_safe
    assert "SIGSEGV" in record.detail


@pytest.mark.parametrize("name", ["alloc_extend", "alloc_decode"])
def test_kernels_that_give_out_tokens_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, rows = Shape(16, 4, 4, 32, "float32"), 64
    subject = sglang_subject.Sglang("torch_native", "cpu")
    layers = [[torch.zeros(rows * subject.block_bytes(shape), dtype=torch.int8) for _ in range(2)]]
    opened = subject.open(shape, layers, rows)
    ids = [3, 9, 17, 21, 30, 31, 32, 50, 63]
    assert opened.wrong_with_ids(ids) == []
    native = getattr(PagedTokenToKVPoolAllocator, name)
    monkeypatch.setattr(PagedTokenToKVPoolAllocator, name, lambda *given: native(*given) % 512)
    assert name in opened.wrong_with_ids(ids)

"""Which layout and which unbacked memory an engine gets, by what was shown of its kernels."""

from __future__ import annotations

import datetime

import pytest

from kvcached import kernel_records
from kvcached.config import Settings
from kvcached.integration.kernels import Ground, Kernels, choose, weakest
from kvcached.kernel_records import KernelRecord


@pytest.fixture(autouse=True)
def records(monkeypatch):
    """Of one engine: a backend that passed, one that reads holes, one that does not reach the highest ids."""
    verdicts = {"good": (True, True), "reads": (False, True), "short": (True, False), "bad": (False, False)}
    known = {
        backend: KernelRecord("vllm", "1", backend, "cpu", holes, top, 1, "", datetime.date(2026, 11, 30))
        for backend, (holes, top) in verdicts.items()
    }

    def lookup(engine: str, version: str, backend: str, device: str, machine: str) -> KernelRecord | None:
        assert machine == kernel_records.this_machine()
        return known.get(backend) if (engine, version, device) == ("vllm", "1", "cpu") else None

    monkeypatch.setattr(kernel_records, "lookup", lookup)


def kernels(*backends: str, version: str = "1") -> Kernels:
    return Kernels("vllm", version, frozenset(backends))


@pytest.mark.parametrize(
    ("backends", "ground"),
    [
        (("good",), Ground("chunked", "hole")),
        (("reads",), Ground("chunked", "zero")),
        (("short",), Ground("per-layer", "hole")),
        (("bad",), Ground("per-layer", "zero")),
        (("good", "reads"), Ground("chunked", "zero")),
        (("good", "short"), Ground("per-layer", "hole")),
        (("reads", "short"), Ground("per-layer", "zero")),
        (("never seen",), Ground("per-layer", "zero")),
        (("good", "never seen"), Ground("per-layer", "zero")),
        ((), Ground("per-layer", "zero")),
    ],
)
def test_auto_goes_by_what_was_shown(backends, ground):
    chosen = choose(Settings(), kernels(*backends), "cpu")
    assert chosen == ground
    said = chosen.warning
    if ground == Ground("chunked", "hole"):
        assert said == ""
        return
    assert "kvcached.verify_kernels" in said and "good" not in said
    assert ("highest block ids" in said) == (ground.layout == "per-layer")
    assert ("leave holes alone" in said) == (ground.unbacked == "zero")
    assert all(backend in said for backend in backends if backend != "good")


def test_another_version_is_another_engine():
    assert choose(Settings(), kernels("good", version="2"), "cpu") == Ground("per-layer", "zero")


def test_what_the_user_says_holds():
    for layout in ("chunked", "per-layer"):
        for unbacked in ("hole", "zero"):
            settings = Settings(layout=layout, unbacked=unbacked)
            for backend in ("good", "bad", "never seen"):
                chosen = choose(settings, kernels(backend), "cpu")
                assert chosen == Ground(layout, unbacked)
                assert chosen.warning == ""  # who decides need not be told
    assert choose(Settings(layout="chunked"), kernels("bad"), "cpu") == Ground("chunked", "zero")
    assert choose(Settings(unbacked="hole"), kernels("bad"), "cpu") == Ground("per-layer", "hole")


def test_several_ranks_get_what_all_of_them_bear():
    best, reads, short = Ground("chunked", "hole"), Ground("chunked", "zero"), Ground("per-layer", "hole")
    assert weakest([best, best]) == best
    assert weakest([best, reads]) == reads
    assert weakest([short, best]) == short
    assert weakest([reads, short]) == Ground("per-layer", "zero")

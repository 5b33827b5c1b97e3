"""The batches that backends are tested with, and what the outcome of a process means. No engine, no kernel."""

from __future__ import annotations

import datetime
import json
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached import kernel_records
from kvcached.kernel_records import KernelRecord
from kvcached.verify_kernels.__main__ import _record, judge
from kvcached.verify_kernels.cases import MODEL_TOKENS, Batch, Shape, batches, blocks_needed
from kvcached.verify_kernels.outcome import HOLES, TOP_IDS, Ended, Outcome, read

if TYPE_CHECKING:
    from pathlib import Path

shapes = st.builds(
    Shape,
    block_tokens=st.sampled_from([1, 2, 16, 32, 64, 128]),
    num_heads=st.just(8),
    num_kv_heads=st.just(2),
    head_size=st.just(64),
    dtype=st.just("float32"),
)


def blocks_written(batch: Batch) -> list[int]:
    """Ordinal of each block that the batch stores into, request by request."""
    block = batch.shape.block_tokens
    return [
        ordinal for request in batch.requests for ordinal in request.blocks[request.context_tokens // block :]
    ]


@given(shape=shapes, quick=st.booleans(), spare=st.integers(0, 20), favoured=st.integers(0, 30))
@settings(deadline=None, max_examples=40)
def test_every_batch_is_one_that_an_engine_could_run(
    shape: Shape, quick: bool, spare: int, favoured: int
) -> None:
    usable = blocks_needed(shape, quick=quick) + spare
    for batch in batches(shape, usable, range(usable - favoured, usable), quick=quick):
        assert batch.table_width * shape.block_tokens >= MODEL_TOKENS
        assert len(batch.requests) + batch.padding <= 64
        assert batch.query_tokens <= MODEL_TOKENS
        named: Counter[int] = Counter()
        for request in batch.requests:
            assert 1 <= request.query_tokens <= request.seq_tokens <= batch.max_seq_tokens <= MODEL_TOKENS
            assert len(request.blocks) == -(-request.seq_tokens // shape.block_tokens)
            assert all(0 < ordinal < usable for ordinal in request.blocks)  # never the null block
            named.update(request.blocks)
        # What is written has one owner: the result is defined.
        assert all(named[ordinal] == 1 for ordinal in blocks_written(batch))
        queries = [request.query_tokens for request in batch.requests]
        assert "mixed" not in batch.name or queries == sorted(queries), "decodes come first"


@given(shape=shapes)
@settings(deadline=None, max_examples=10)
def test_the_same_batches_every_time(shape: Shape) -> None:
    usable = blocks_needed(shape)
    favoured = [1, 5, 7]
    assert list(batches(shape, usable, favoured)) == list(batches(shape, usable, favoured))
    names = [batch.seed for batch in batches(shape, blocks_needed(shape, rounds=3), favoured, rounds=3)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("quick", [False, True])
def test_what_can_go_wrong_is_among_them(quick: bool) -> None:
    shape = Shape(16, 8, 2, 64, "float32")
    usable = blocks_needed(shape, quick=quick)
    favoured = list(range(20, usable))
    made = list(batches(shape, usable, favoured, quick=quick))
    requests = [request for batch in made for request in batch.requests]
    assert any(r.query_tokens == 1 for r in requests)
    assert any(1 < r.query_tokens < r.seq_tokens for r in requests)
    assert any(1 < r.query_tokens == r.seq_tokens for r in requests)
    assert any({r.query_tokens == 1 for r in batch.requests} == {True, False} for batch in made)
    assert any(batch.padding for batch in made)
    assert any(len(batch.requests) > 30 for batch in made)
    assert any(r.seq_tokens > 1000 for r in requests)
    assert any(r.seq_tokens < 16 for r in requests)
    at_the_edge = [r for r in requests if r.seq_tokens % 16 == 0 and r.blocks[-1] in favoured]
    assert len(at_the_edge) > len(requests) / 5
    stale = [batch.table_width - len(r.blocks) for batch in made for r in batch.requests]
    assert min(stale) < 100 < max(stale)
    assert quick or any(batch.max_seq_tokens > max(r.seq_tokens for r in batch.requests) for batch in made)


def test_too_few_blocks_are_an_error() -> None:
    shape = Shape(16, 8, 2, 64, "float32")
    with pytest.raises(ValueError, match="blocks_needed"):
        list(batches(shape, blocks_needed(shape) // 2, []))


# ------------------------------------------------------------ what is recorded


@pytest.mark.parametrize(
    ("later", "recorded"),
    [
        ({"cases": 100}, True),
        ({"cases": 99}, False),  # a quick run after a whole one
        ({"cases": 99, "hole_safe": False}, True),
        ({"cases": 99, "machine": "another"}, True),
    ],
)
def test_a_pass_of_fewer_cases_replaces_nothing(
    later: dict[str, Any], recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = {"engine": "vllm", "version": "1", "backend": "B", "device": "cpu", "machine": "one", "detail": ""}
    first = KernelRecord(**told, hole_safe=True, top_ids=True, cases=100, when=datetime.date(2026, 1, 2))
    _record([first])
    second = KernelRecord(**vars(first) | {"detail": "later"} | later)
    _record([second])
    assert (second in kernel_records.records()) is recorded


# ------------------------------------------------------------ what a process's end means

SUBJECT = {"backend": "B", "version": "1", "device_name": "NVIDIA H200", "machine": "sm_90"}


def outcome(*events: dict[str, Any] | str, code: int | None = 0, fault: str | None = None) -> Outcome:
    """Of one process that reported these and ended so."""
    found = Outcome()
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    read(lines, Ended(code, 60, fault), found)
    return found


def whole(phase: str, *between: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"phase": phase}, {"case": "one"}, *between, {"cases": 7, "address_bytes": 1 << 37}]


def test_both_phases_ran_and_nothing_differed() -> None:
    verdict = judge("vllm", "B", outcome(SUBJECT, *whole(HOLES), *whole(TOP_IDS)))
    assert verdict.record is not None
    assert (verdict.record.hole_safe, verdict.record.top_ids, verdict.record.cases) == (True, True, 14)
    assert verdict.record.detail == (
        "holes: 7 cases in 128 GiB of addresses; top ids: 7 cases in 128 GiB of addresses"
    )
    assert (verdict.record.version, verdict.record.device, verdict.record.machine) == (
        "1",
        "NVIDIA H200",
        "sm_90",
    )


def test_a_record_says_what_was_special_about_its_run() -> None:
    record = judge("vllm", "B", outcome(SUBJECT, *whole(HOLES), *whole(TOP_IDS), {"note": "no nvcc"})).record
    assert record is not None
    assert record.detail.endswith("; no nvcc")


def test_a_difference_is_a_failure_of_its_phase() -> None:
    found = outcome(SUBJECT, *whole(HOLES), *whole(TOP_IDS, {"differs": "one: output"}, {"differs": "two"}))
    record = judge("vllm", "B", found).record
    assert record is not None
    assert (record.hole_safe, record.top_ids) == (True, False)
    assert "differs from dense tensors in one: output and 1 more" in record.detail


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ({"code": -signal.SIGSEGV}, "SIGSEGV in one"),
        ({"code": -signal.SIGBUS}, "SIGBUS in one"),
        ({"code": -signal.SIGABRT, "fault": "illegal memory access"}, "illegal memory access in one"),
    ],
)
def test_a_process_that_died_of_a_touch_has_failed(end: dict[str, Any], how: str) -> None:
    record = judge("vllm", "B", outcome(SUBJECT, {"phase": HOLES}, {"case": "one"}, '{"cas', **end)).record
    assert record is not None
    assert (record.hole_safe, record.top_ids) == (False, False)
    assert record.detail == f"holes: {how}; top ids: not shown"


def test_a_fault_that_the_process_reported_itself() -> None:
    events = [SUBJECT, {"phase": HOLES}, {"case": "one"}, {"fault": "illegal memory access"}]
    record = judge("vllm", "B", outcome(*events, code=1)).record
    assert record is not None
    assert not record.hole_safe


def test_the_second_phase_is_judged_after_a_death_in_the_first() -> None:
    found = outcome(SUBJECT, {"phase": HOLES}, {"case": "one"}, code=-signal.SIGSEGV)
    read(map(json.dumps, [SUBJECT, *whole(TOP_IDS)]), Ended(0), found)
    record = judge("vllm", "B", found).record
    assert record is not None
    assert (record.hole_safe, record.top_ids) == (False, True)


@pytest.mark.parametrize(
    ("events", "end", "why"),
    [
        ([], {"code": 1}, "exit code 1"),
        ([], {"code": -signal.SIGSEGV}, "SIGSEGV"),  # before it was anybody's fault
        ([{"untested": "not installed: x"}], {}, "not installed: x"),
        ([SUBJECT, {"phase": HOLES}, {"case": "one"}], {"code": None}, "no end after 60 s"),
        ([SUBJECT, {"phase": HOLES}, {"case": "one"}], {"code": -signal.SIGKILL}, "SIGKILL"),
        ([SUBJECT, {"phase": HOLES}, {"case": "one"}, {"untested": "out of memory"}], {"code": 1}, "in one"),
        ([SUBJECT, *whole(HOLES), {"phase": TOP_IDS}, {"untested": "out of memory"}], {}, "out of memory"),
        ([SUBJECT, *whole(HOLES)], {"code": 3}, "exit code 3"),
    ],
)
def test_any_other_end_is_no_verdict(events: list[Any], end: dict[str, Any], why: str) -> None:
    verdict = judge("vllm", "B", outcome(*events, **end))
    assert verdict.record is None
    assert verdict.untested is not None
    assert why in verdict.untested


def test_a_failure_stands_though_the_other_phase_could_not_run() -> None:
    events = [SUBJECT, *whole(HOLES, {"differs": "one"}), {"phase": TOP_IDS}, {"untested": "out of memory"}]
    record = judge("vllm", "B", outcome(*events)).record
    assert record is not None
    assert (record.hole_safe, record.top_ids) == (False, False)
    assert record.detail.endswith("top ids: not shown")

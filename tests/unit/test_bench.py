"""What the tables of bench say of runs, and what bench.matrix reads in an engine's name."""

from __future__ import annotations

import pytest

from bench import matrix, tables, two_engines
from bench.tables import Run

A, B, C = [[1, 2], [3, 4]], [[1, 2], [3, 9]], [[7, 7], [3, 4]]


def run(*passes, cached=0):
    rows = [
        {"event": "pass", "number": n, "cached_tokens": cached, "digest": "d" * 16, "peak_mib": 9}
        | {"output_tokens_per_s": 100.0 + n}
        for n in range(len(passes))
    ]
    start = {"event": "start", "used_mib": 1234}
    return Run([start, *rows, {"event": "idle", "used_mib": 5}], list(passes))


def test_equality_is_claimed_where_native_equals_itself():
    assert tables.verdict(run(A, A), run(A, A), run(A, A)) == "equal in 2 of 2, hits equal"
    assert "DIFFERS: 1 of 2 requests" in tables.verdict(run(A), run(A), run(B))


def test_a_share_where_native_differs_from_itself():
    said = tables.verdict(run(A, A), run(A, B), run(A, C))
    assert said == "equal; 1 of 2 requests (native again 1), hits equal"
    assert "equal in" not in tables.verdict(run(A), run(B), run(A)), "no claim, even where ours is equal"


def test_other_hits_are_told():
    assert "HITS EQUAL IN 0 OF 1" in tables.verdict(run(A), run(A), run(A, cached=3))


@pytest.mark.parametrize(
    ("native", "again", "other", "said"),
    [
        (run(), run(A), run(A), "not run"),
        (run(A), run(A), run(), "not run"),
        (run(A, A), run(A, A), run(A), "ended early"),
        (run(A), run(), run(A), "ended early"),
    ],
)
def test_missing_passes_are_no_verdict(native, again, other, said):
    assert tables.verdict(native, again, other).startswith(said)


def test_tables_hold_runs_that_ended_early():
    results = {("e", "on"): {"native": run(A, A, A), "ours": tables.NO_RUN}}
    native, ours = tables.speed_table(results).splitlines()[2:]
    assert "| native | 100 | 1.000 | 102 | 1.000 | 0 / 0 / 0 | 1,234 / 9 / 5 / - |" in native
    assert "nan" in ours
    assert "not run" in tables.tokens_table(results)


@pytest.mark.parametrize(
    ("engine", "command", "environment"),
    [
        ("0.29.0", ["bench.vllm_run"], {}),
        ("0.26.0-v1", ["bench.vllm_run"], {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
        ("0.26.0-v2", ["bench.vllm_run"], {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
        ("sglang-0.5.17-p16", ["bench.sglang_run", "--page-size", "16"], {}),
        ("sglang-0.5.17-p1-det", ["bench.sglang_run", "--page-size", "1", "--deterministic"], {}),
    ],
)
def test_an_engines_name(engine, command, environment):
    assert matrix.command_of(engine) == (command, environment)


def test_an_unknown_part_of_a_name():
    with pytest.raises(SystemExit, match="p<page size>"):
        matrix.command_of("sglang-0.5.17-x")


def test_two_engines_without_the_native_runs():
    burst = two_engines.Burst("e", 0.0, 2.0, 64.0, 6 << 30, 64 << 20, A)
    shared = two_engines.Together(10 << 30, 20480, [burst], [])
    assert "| 1 | e | 2.0 | 64 | nan | 6.0 | 60% | 0.06 | not run |" in two_engines.table(shared, {})
    assert "| 32 | 6.0 | 60% | 0.06 | equal |" in two_engines.table(shared, {"e": [(32.0, A), (33.0, A)]})
    assert "(native again 1)" in two_engines.table(shared, {"e": [(32.0, A), (33.0, B)]})

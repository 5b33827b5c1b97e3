"""What the tables of bench say of runs, and what bench.matrix reads in an engine's name."""

from __future__ import annotations

import argparse

import pytest

from bench import harness, matrix, sharing, tables, two_engines
from bench import map as mapping
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


def test_the_line_that_begins_a_burst_may_name_its_prompts():
    assert [harness.seed_of(line) for line in ("burst\n", "burst 12\n", "\n", "burst now\n")] == [1, 12, 1, 1]


def test_sharing_shows_capacity_and_tokens_beside_those_alone():
    show = sharing.Show("beside", {"0-e": (90, 100)}, peak_bytes={"0-e": 3 << 30})
    show.bursts.append(sharing.Burst("0-e", 10, 4.0, 6.5, 1234, "equal"))
    assert "| 0-e | 90 | 100 | 0.900 | 3.0 |" in sharing.table(show)
    assert "| 0-e | 10 | 4 | 2.5 | 1,234 | equal |" in sharing.table(show)
    alone = {"e": sharing.Alone(99, 100, {10: [A, A]}, 2.0)}
    kept = sharing.record([show], alone)
    assert kept["alone"]["e"]["tokens"] == {10: [harness.digest(A)] * 2}
    assert kept["shows"][0]["capacity"] == {"0-e": (90, 100)}


GIB = 1 << 30


def sample(who, back_ms, *, layout="chunked", unbacked="hole", page_mib=16, units=2048, gib=32, **more):
    """Of one process of bench.map: releasing takes half as long, one call a tenth, the ends 1 and 80 ms."""
    times = {"back": back_ms, "release": back_ms / 2, "back_one_call": back_ms / 10}
    times |= {"release_one_call": back_ms / 20, "create": 1.0, "shutdown": 80.0}
    row = {"who": who, "layout": layout, "unbacked": unbacked, "page_mib": page_mib, "units": units}
    row |= {f"{key}_us": ms * 1000 for key, ms in times.items()}
    return row | {"backed_bytes": gib * GIB, "kept_bytes": 0, "round": 0, **more}


def lines_of(table, start):
    return [line for line in table.splitlines() if line.startswith(f"| {start} ")]


def test_map_ratios_are_of_medians_over_the_rounds():
    floors = [sample("floor", ms) for ms in (60.0, 900.0, 80.0)]
    table = mapping.table([*floors, sample("ours", 88.0)])
    each, once, ends = lines_of(table, "chunked | hole | 16")
    assert each == "| chunked | hole | 16 | 80 / 40 | 88 / 44 | 1.10 / 1.10 | - | - | - | - |"
    assert once.startswith("| chunked | hole | 16 | 8 / 4 | 8.8 / 4.4 | 1.10 / 1.10 |")
    assert ends.startswith("| chunked | hole | 16 | 1 / 80 | 1 / 80 | 1.00 / 1.00 |")
    assert table.endswith("32 GiB backed, medians of 1 to 3 rounds.")


def test_map_compares_with_the_peer_by_what_it_backed():
    peers = [
        sample("peer", 100.0, units=128, gib=16),  # half as much memory
        sample("peer", 2000.0, layout="per-layer", page_mib=128, units=256, back_calls=256 * 192),
    ]
    table = mapping.table([*peers, sample("ours", 80.0)])
    each, _, ends = lines_of(table, "chunked | hole | 16")
    assert each == "| chunked | hole | 16 | - | 80 / 40 | - | 0.40 / 0.40 | 0.04 / 0.04 | - | - |"
    assert "| 1.00 / 1.00 | 1.00 / 1.00 |" in ends, "creating and shutting down are not by the byte"
    assert lines_of(table, "per-layer | hole | 128")[0].endswith("| - | - | - | - | - | - | - |")
    assert lines_of(table, "contiguous")[0].startswith(
        "| contiguous | 128 | 16 | 100 / 50 | 10 / 5 | 1 / 80 |"
    )
    assert "| 192 / - |" in lines_of(table, "per layer")[0]


def test_map_counts_driver_calls_of_a_page_and_of_the_ends():
    counts = {"back_calls": 3 * 2048, "release_calls": 2 * 2048, "create_calls": 8195, "shutdown_calls": 3}
    table = mapping.table([sample("ours", 80.0, **counts)])
    each, _, ends = lines_of(table, "chunked | hole | 16")
    assert each.endswith("| - | 3 / 2 |")
    assert ends.endswith("| - | 8,195 / 3 |")


def test_map_says_whether_cached_handles_pay():
    cached = sample("ours", 60.0, unbacked="cached", release_us=60_000.0)
    samples = [sample("ours", 80.0), cached, sample("floor", 1.0)]
    (line,) = lines_of(mapping.table(samples), "16")
    assert line == "| 16 | - / - / - | 0.75 / 1.50 / 1.00 |", "clearing makes releasing slower"
    assert "cache of released handles" not in mapping.table(samples[:1])


def test_map_without_a_sample():
    assert mapping.table([]) == "nothing was measured"


def test_map_cases():
    names = [case.name for case in mapping.CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= mapping.BESIDE_PEER
    assert {case.page_mib // case.width for case in mapping.CASES if case.layout == "per-layer"} == {2}


@pytest.mark.parametrize(("backed", "seen"), [(32 * GIB, 16 * GIB), (32 * GIB, 64 * GIB)])
def test_map_does_not_believe_in_memory_that_the_device_does_not_see(backed, seen):
    with pytest.raises(SystemExit, match="the device says"):
        mapping.check_backed({"backed_bytes": backed, "device_bytes": seen})


@pytest.mark.parametrize("case", mapping.CASES, ids=lambda case: case.name)
def test_map_measures_ours_on_ordinary_memory(case):
    args = argparse.Namespace(device="cpu", total_bytes=256 << 20, whole_bytes=2 * GIB)
    sample = mapping.ours(case, args)
    assert sample["backed_bytes"] == sample["device_bytes"] == 256 << 20
    assert all(sample[f"{name}_us"] > 0 for name in ("create", "back", "release", "shutdown"))
    assert ("first_back_us" in sample) == (case.unbacked == "cached")

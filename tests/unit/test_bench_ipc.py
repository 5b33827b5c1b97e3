"""bench.ipc on ordinary memory, tiny."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from bench import ipc, processes

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.usefixtures("own_sockets")


def run(*options: str) -> processes.Ended:
    return processes.run([sys.executable, "-m", "bench.ipc", *options], limit_s=90)


def test_a_run_says_what_every_call_took_and_what_of_it_was_the_ranks_own(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out" / "ipc.json"
    ended = run("--ranks", "1", "2", "--pages", "1", "3", "--calls", "30", "--out", str(out))
    assert not ended.trouble, ended.err
    data = json.loads(out.read_text())
    rows = data["rows"]
    assert [json.loads(line[7:]) for line in ended.out.splitlines() if line.startswith("RESULT ")] == rows
    expected = [(r, p, f) for r in (1, 2) for p in (1, 3) for f in ("map", "unmap", "wait")]
    assert [(row["ranks"], row["pages"], row["figure"]) for row in rows] == expected
    for row in rows:
        assert row["calls"] == 30
        for name in ("took", "own", "over"):
            assert 0 < row[f"{name}_us"] <= row[f"{name}_p99_us"], row
        assert row["took_us"] > row["own_us"], row
    assert f"| 2 | 3 | unmap | {ipc.number(rows[-2]['took_us'])} |" in ended.out


def test_the_slowest_rank_counts_in_each_step_of_a_call() -> None:
    one = [
        ("map", 5e-6),
        ("prepare", 1e-6),
        ("commit", 7e-6),
        ("map", 1e-6),
        ("prepare", 2e-6),
        ("commit", 2e-6),
    ]
    two = [
        ("map", 3e-6),
        ("prepare", 4e-6),
        ("commit", 1e-6),
        ("map", 9e-6),
        ("prepare", 1e-6),
        ("commit", 3e-6),
    ]
    assert ipc.own_work("map", [one, two]) == pytest.approx([5, 9])
    assert ipc.own_work("unmap", [one, two]) == pytest.approx([4 + 7, 2 + 3])
    assert ipc.own_work("unmap", [[("unmap", 2e-6)]]) == pytest.approx([2])
    with pytest.raises(ValueError, match="shorter"):
        ipc.own_work("map", [one, two[:3]])
    call = ipc.Call(took=10, own=4)
    assert ipc.summary([call, call]) == {
        "calls": 2,
        "took_us": 10,
        "took_p99_us": 10,
        "own_us": 4,
        "own_p99_us": 4,
        "over_us": 6,
        "over_p99_us": 6,
    }


@pytest.mark.parametrize("options", [["--ranks", "0"], ["--pages", "64"], ["--calls", "0"]])
def test_options_that_measure_nothing_are_refused(options: list[str]) -> None:
    ended = run(*options)
    assert ended.trouble == "exit 2" and "at least one" in ended.err


def test_a_rank_that_cannot_start_ends_the_run_with_its_reason() -> None:
    ended = run("--device", "no such", "--ranks", "2", "--calls", "1")
    assert ended.trouble and "no such" in ended.err

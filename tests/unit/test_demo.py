"""The demo's arithmetic and its verdict, without an engine."""

from __future__ import annotations

import pytest

from demo import report, workload
from demo.__main__ import judge
from demo.run import Burst, Run, Sample

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

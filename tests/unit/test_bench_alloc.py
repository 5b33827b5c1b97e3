"""bench.alloc on ordinary memory, and against a package that has the peer's names."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from bench import alloc, peer, processes
from bench.alloc import CASES, Case
from bench.managers import Blocks, Ours, UnmeasuredError

if TYPE_CHECKING:
    import pathlib

# What its children import as `kvcached`: blocks in pages of 64, the lowest first. FAKE says what is odd about it.
FAKE_PEER = {
    "torch.py": """
bfloat16, device = "bfloat16", str

def zeros(size, device):
    assert device == "cuda:0"

class cuda:
    used = 0

    def synchronize():
        pass

    def mem_get_info():
        return 2**40 - cuda.used, 2**40
""",
    "kvcached/__init__.py": "",
    "kvcached/vmm_ops.py": """
import os, signal
made = {}

def init_kvcached(dev_str, page_size=0, contiguous_layout=True):
    if os.environ["FAKE"] == "no vmm_ops":
        raise RuntimeError("not like this")
    made["init"] = True

def create_kv_tensors(size, dtype_size, dev_str, num_layers, num_kv_buffers=2, group_id=0):
    made["bytes"] = size
    return ["tensor"] * num_layers

def shutdown_kvcached():
    if os.environ["FAKE"] == "dies in its end":
        os.kill(os.getpid(), signal.SIGKILL)
""",
    "kvcached/kv_cache_manager.py": """
import collections, heapq, os, signal, time
import torch
from kvcached import vmm_ops

FAKE = os.environ["FAKE"]

class KVCacheManager:
    def __init__(self, num_blocks, block_size, cell_size, num_layers, world_size=1, *, num_kv_buffers=2, **more):
        assert vmm_ops.made["bytes"] == num_blocks * block_size * cell_size * num_kv_buffers
        if FAKE == "unknown parameter":
            raise TypeError("it wants something else")
        num_blocks //= 2 if FAKE == "half of the blocks" else 1
        self._page_bytes, self._held = num_layers * num_kv_buffers << 21, collections.Counter()
        self._free, self._ready = list(range(num_blocks)), time.monotonic() + 0.2

    def alloc(self, need_size):
        if time.monotonic() < self._ready:
            raise RuntimeError("its tensors are not there")
        if FAKE == "dies after vmm_ops" and "init" in vmm_ops.made and need_size > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAKE == "stuck" and need_size == 16:
            time.sleep(1000)
        if need_size > len(self._free):
            return None
        ids = [heapq.heappop(self._free) for _ in range(need_size)]
        self._hold(ids, 1)
        return ids

    def free(self, indices):
        for index in indices:
            heapq.heappush(self._free, index)
        self._hold(indices, -1)

    def _hold(self, ids, by):
        for page in (i // 64 for i in ids):
            self._held[page] += by
            if not self._held[page]:
                del self._held[page]
        torch.cuda.used = len(self._held) * self._page_bytes

    def available_size(self):
        if FAKE == "no available_size":
            raise NotImplementedError("not in this version")
        return len(self._free)
""",
    "kvcached/integration/__init__.py": "",
    "kvcached/integration/vllm/__init__.py": "",
    "kvcached/integration/vllm/interfaces.py": """
import os
from kvcached import vmm_ops
from kvcached.kv_cache_manager import KVCacheManager

def init_kvcached(tp_rank=0, tp_size=1, device=None):
    assert device == "cpu" and os.environ["ENABLE_KVCACHED"] == "true"

def alloc_kv_cache(kvcache_shape, block_size, dtype, device, num_layers, attention_type="MHA"):
    kinds, blocks, tokens, heads, size = kvcache_shape
    vmm_ops.made["bytes"] = kinds * blocks * tokens * heads * size * 2
    return ["tensor"] * num_layers

def get_kv_cache_manager(num_blocks, block_size, cell_size, num_layers):
    return KVCacheManager(num_blocks, block_size, cell_size, num_layers)
""",
}


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Its folder; what is odd about it is said by `FAKE`."""
    for name, text in FAKE_PEER.items():
        file = tmp_path / "peer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("FAKE", "")
    return tmp_path / "peer"


def options(folder: pathlib.Path | None = None, **more) -> argparse.Namespace:
    found = {"device": "cpu", "seconds": 0.002, "quick": True, "limit_s": 60.0, "route": "vmm_ops"}
    return argparse.Namespace(**found | {"peer": str(folder)} | more)


def peer_sample(fake: pathlib.Path, case: str, *, limit_s: float = 60.0):
    return alloc.Runner(options(fake), fake).sample("peer", case_of(case), limit_s)


# ---------------------------------------------------------------- ours


EXPECTED = {
    "sizes": {*(f"alloc-{n}" for n in (1, 16, 256, 4096)), "available"},
    "partial": {f"partial-{n}" for n in (1, 100, 1000)},
    "holes": {"holes"},
    "reserve": {"reserve-page", "reserve-one"},
    "emptying": {"free", "free-paced"},
    "emptying-64": {"free", "free-paced"},
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_on_ordinary_memory(case, monkeypatch, capsys, nothing_stays):
    monkeypatch.setenv("KVCACHED_UNBACKED", "hole")
    monkeypatch.setenv("KVCACHED_MAX_RESERVED_MB", "1")
    args = options()
    subject = alloc.subject_of(case, "ours", args)
    try:
        sample = alloc.measure(case, subject, args)
    finally:
        subject.close()
        subject = None
        gc.collect()
    assert sample["failed"] == {} and sample["running"] is None
    lists = {key for key in sample["figures"] if not key.endswith(("-array", "-into"))}
    assert lists == EXPECTED[case.name]
    assert all(0 < f["median_us"] <= f["max_us"] * 1.5 for f in sample["figures"].values())
    assert all(f["p99_us"] <= f["max_us"] for f in sample["figures"].values())
    reported = [line for line in capsys.readouterr().out.splitlines() if line.startswith(processes.SAMPLE)]
    assert json.loads(reported[-1][len(processes.SAMPLE) :]) == sample


def test_what_is_built_is_what_is_said(nothing_stays):
    case = case_of("holes")
    subject = Ours(case.shape, case.pages, "cpu")
    try:
        blocks = Blocks(subject)
        pages = blocks.exhaust()
        assert len(pages) == case.pages and subject.manager.available_size() == 0
        for page in pages[:5]:
            blocks.free(page, slice(3, 4))
        assert subject.manager.available_size() == 5
        assert subject.manager.get_page_occupancy(pages[:6]) == [(63, 64)] * 5 + [(64, 64)]
        with pytest.raises(UnmeasuredError, match=r"alloc\(6\) gave None"):
            blocks.take(6)
        blocks.clear()
        assert subject.manager.held_size() == 0
        whole = blocks.whole(3)
        assert subject.manager.get_page_occupancy(whole) == [(64, 64)] * 3
        assert subject.manager.held_size() == 192
        blocks.clear()
    finally:
        subject.close()
        del subject, blocks
        gc.collect()


class Arrays:
    """A manager with every form of ids."""

    def __init__(self, *, enough: bool = True) -> None:
        self.calls: list[str] = []
        self._enough = enough

    def alloc(self, n):
        self.calls.append("alloc")
        return list(range(n))

    def alloc_array(self, n):
        self.calls.append("alloc_array")
        return range(n)

    def alloc_into(self, buffer):
        self.calls.append(f"alloc_into {len(buffer)} {buffer.dtype}")
        return self._enough

    def free(self, ids):
        self.calls.append(f"free {len(ids)}")


def test_every_form_of_ids_that_there_is():
    manager = Arrays()
    for batch in alloc.cycles(manager, 3).values():
        batch(2)
    pairs = zip(manager.calls[::2], manager.calls[1::2], strict=True)
    expected = ["alloc"] * 2 + ["alloc_array"] * 2 + ["alloc_into 3 int64"] * 2
    assert list(pairs) == [(call, "free 3") for call in expected]
    with pytest.raises(UnmeasuredError, match="alloc_into"):
        alloc.cycles(Arrays(enough=False), 3)["-into"](1)


def test_short_calls_are_timed_in_batches_and_long_ones_alone():
    short = alloc.timed(lambda times: [None for _ in range(times)], 0.01)
    assert short["batch"] > 10 and short["median_us"] < short["p99_us"]
    long = alloc.timed(lambda times: time.sleep(0.002 * times), 0.01)
    assert long["batch"] == 1 and long["median_us"] >= 2000
    assert long["repeats"] >= alloc.LEAST_REPEATS
    assert gc.isenabled()


def test_percentiles():
    found = alloc.summary(1500.0, [float(n) for n in range(1000, 0, -1)])
    assert found == {"median_us": 1.5, "p99_us": 0.99, "max_us": 1.0, "repeats": 1000}
    assert alloc.percentile([7.0], 0.99) == 7.0


def test_a_paced_stream_frees_in_order():
    freed: list[list[int]] = []
    start = time.perf_counter()
    times = alloc.stream(freed.append, [[1], [2], [3]], 2_000_000)
    assert time.perf_counter() - start >= 0.006 and max(times) < 2_000_000
    assert freed == [[1], [2], [3]]


# ---------------------------------------------------------------- the peer


def test_the_peer_through_vmm_ops(fake):
    sample = peer_sample(fake, "sizes")
    assert sample["failed"] == {} and set(sample["figures"]) == EXPECTED["sizes"]
    about = sample["about"]
    assert about["route"] == "vmm_ops" and about["page_blocks"] == 64 and about["ready_s"] >= 0.2
    assert about["forms"]["init_kvcached"] == "('cpu', 0, True) {}"
    assert about["forms"]["KVCacheManager"].startswith("(num_blocks, block_size, cell_size, num_layers")
    assert about["forms"]["alloc"] == "(need_size)"
    assert sample["figures"]["alloc-256"]["pages"] == 5


@pytest.mark.parametrize("case", ["partial", "holes", "reserve", "emptying"])
def test_the_peer_in_every_case(fake, case):
    sample = peer_sample(fake, case)
    assert sample["failed"] == {} and set(sample["figures"]) == EXPECTED[case]
    assert sample["about"].get("available_over_holes") == (1000 if case == "holes" else None)


@pytest.mark.parametrize("case", ["holes", "emptying-64"])
def test_the_peer_as_on_a_gpu(fake, case, capsys):
    sample = alloc.Runner(options(fake, device="cuda:0"), fake).sample("peer", case_of(case), 60.0)
    assert sample["failed"] == {} and set(sample["figures"]) == EXPECTED[case]
    counting = sample["about"]["counting"]  # where there is a compiler
    assert counting != ("calls.so is not built" in capsys.readouterr().out)
    for figure in sample["figures"].values():
        assert figure.get("driver_calls") == (0 if counting else None)
    if case == "holes":
        assert sample["figures"]["holes"]["backed_pages"] == 1008
    else:
        assert {f["gone_at_last_free"] for f in sample["figures"].values()} == {64}
        assert sample["about"]["page_bytes"] == 128 << 20


def test_the_peer_through_its_interfaces(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "no vmm_ops")
    runner = alloc.Runner(options(fake), fake)
    sample = runner.sample("peer", case_of("reserve"), 60.0)
    assert sample["about"]["route"] == "interfaces" and sample["failed"] == {}
    assert set(sample["figures"]) == EXPECTED["reserve"]
    assert "FAILED peer reserve" in (said := capsys.readouterr().out) and "not like this" in said
    assert runner._all_ways("peer")[0].route == "interfaces", "the next case begins with what works"


def test_what_the_peer_cannot_do_is_told_and_the_rest_goes_on(fake, monkeypatch):
    monkeypatch.setenv("FAKE", "no available_size")
    sample = peer_sample(fake, "sizes")
    assert sample["failed"] == {"available": "NotImplementedError: not in this version"}
    assert set(sample["figures"]) == EXPECTED["sizes"] - {"available"}


def test_a_peer_that_hangs_keeps_what_it_had_and_is_not_asked_again(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "stuck")
    runner = alloc.Runner(options(fake), fake)
    sample = runner.sample("peer", case_of("sizes"), 3.0)
    assert set(sample["figures"]) == {"alloc-1"}
    assert sample["failed"] == {"alloc-16": "no end after 3 s"}
    assert runner.sample("peer", case_of("sizes"), 3.0) is None
    assert "no end after 3 s" in capsys.readouterr().out


def test_a_route_that_gives_no_figure_is_not_the_last(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "dies after vmm_ops")
    runner = alloc.Runner(options(fake), fake)
    sample = runner.sample("peer", case_of("reserve"), 60.0)
    assert sample["about"]["route"] == "interfaces" and set(sample["figures"]) == EXPECTED["reserve"]
    said = capsys.readouterr().out
    assert "FAILED peer reserve Way(counting=False, route='vmm_ops'): {'reserve-page': 'exit -9'" in said


def test_a_pool_that_is_too_small_for_the_holes(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "half of the blocks")
    sample = peer_sample(fake, "holes")
    assert sample["failed"] == {"holes": "UnmeasuredError: 504 pages can be held whole, not 1000"}
    assert sample["figures"] == {} and capsys.readouterr().out.count("504 pages") == 2


def test_a_peer_that_dies_in_its_end_keeps_all(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "dies in its end")
    sample = peer_sample(fake, "reserve")
    assert sample["failed"] == {} and set(sample["figures"]) == EXPECTED["reserve"]
    assert "exit -9" in capsys.readouterr().out


def test_a_peer_that_cannot_be_made(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "unknown parameter")
    assert peer_sample(fake, "reserve") is None
    assert capsys.readouterr().out.count("it wants something else") == 2, "both routes"


def test_another_package_is_not_taken_for_the_peer(fake, tmp_path, monkeypatch):
    about = {"package": str(fake / "kvcached" / "__init__.py")}
    monkeypatch.setattr(alloc, "Peer", lambda *_: argparse.Namespace(about=about))
    assert alloc.subject_of(CASES[0], "peer", options(fake)).about == about
    with pytest.raises(UnmeasuredError, match="is not the package in"):
        alloc.subject_of(CASES[0], "peer", options(tmp_path / "elsewhere"))


def test_forms_are_tried_until_one_is_taken():
    def two(first, second, *, third=3):
        return first, second, third

    taken: dict[str, str] = {}
    assert peer.call_any(two, ((1,), {}), ((1, 2), {}), taken=taken) == (1, 2, 3)
    assert taken == {"two": "(1, 2) {}"}
    with pytest.raises(SystemExit, match="two takes none of"):
        peer.call_any(two, ((), {}))
    with pytest.raises(SystemExit, match="answered False"):
        peer.call_any(lambda: False, ((), {}))


def test_a_call_by_the_names_of_its_parameters():
    def three(first, /, second, *, third=3, **_):
        return first, second, third

    taken: dict[str, str] = {}
    known = {"first": 1, "second": 2, "unrelated": 9}
    assert peer.call_named(three, known, taken=taken) == (1, 2, 3)
    assert taken == {"three": "(first, /, second, *, third=3, **_)"}
    with pytest.raises(SystemExit, match="nobody knows what second should be"):
        peer.call_named(three, {"first": 1}, taken=taken)


# ---------------------------------------------------------------- processes


def test_a_process_that_does_not_end_is_ended_with_what_it_started():
    code = "import subprocess, sys; print('said', flush=True); subprocess.run(['sleep', '1000'])"
    start = time.monotonic()
    ended = processes.run([sys.executable, "-c", code], limit_s=1.0)
    assert ended.trouble == "no end after 1 s" and ended.out == "said\n"
    assert time.monotonic() - start < 10


def test_the_last_sample_counts():
    code = "print('SAMPLE {\"a\": 1}'); print('SAMPLE {\"a\": 2}'); raise SystemExit('enough')"
    sample, trouble = processes.sample_of([sys.executable, "-c", code], limit_s=30.0)
    assert sample == {"a": 2} and trouble.startswith("exit 1") and "enough" in trouble
    with pytest.raises(RuntimeError, match="exit 0"):
        processes.sample_of([sys.executable, "-c", "pass"], limit_s=30.0)


# ---------------------------------------------------------------- tables


def row(who, case, figure, median, *, p99=None, top=None, **more):
    found = {"who": who, "case": case, "figure": figure, "round": 0, "median_us": median}
    return found | {"p99_us": p99 or median * 2, "max_us": top or median * 9, "repeats": 99, **more}


def data(*rows, device="cuda:0", quick=False):
    return {"machine": "NVIDIA H200", "device": device, "quick": quick, "rows": list(rows), "about": []}


def lines_of(table, start):
    return [line for line in table.splitlines() if line.startswith(f"| {start} ")]


def test_bars_are_held_against_medians_over_the_rounds():
    rows = [row("ours", "sizes", "alloc-1", us, top=us) for us in (0.4, 70.0, 0.8)]
    rows += [row("peer", "sizes", "alloc-1", 16.0), row("ours", "sizes", "alloc-256", 12.0)]
    rows += [row("ours", "sizes", "alloc-256-array", 3.0), row("ours", "sizes", "available", 0.1)]
    table = alloc.table(data(*rows))
    assert lines_of(table, "alloc(1) + free") == [
        "| alloc(1) + free | 0.8 / 1.6 / 70 | 16 / 32 / 144 | 20x | < 1 | pass |"
    ]
    assert lines_of(table, "alloc(256) + free")[0].endswith("| - | - | < 10 | **FAIL** |")
    assert lines_of(table, "alloc(256) + free, `alloc_array`")[0].endswith(
        "| - | - | - | - |"
    )  # lists alone have bars
    assert lines_of(table, "available_size()")[0].endswith("| < 0.2 | pass |")
    assert table.endswith("NVIDIA H200, medians of 1 to 3 rounds.")


def test_whether_it_is_flat():
    few, many = row("ours", "partial", "partial-1", 0.5), row("ours", "partial", "partial-1000", 0.6)
    theirs = [row("peer", "partial", f"partial-{n}", us) for n, us in ((1, 15.0), (1000, 645.0))]
    assert lines_of(alloc.table(data(few, many, *theirs)), "the same, 1,000 against 1") == [
        "| the same, 1,000 against 1 | 1.20 | 43.00 | - | < 1.5 | pass |"
    ]
    slow = row("ours", "partial", "partial-1000", 0.8)
    assert "| 1.60 | - | - | < 1.5 | **FAIL** |" in alloc.table(data(few, slow))
    assert "the same" not in alloc.table(data(few)), "a ratio needs both"


def test_frees_are_barred_by_p99_and_on_a_gpu_only():
    went = {"pages": 512, "gone_at_last_free": 30.4, "gone_after": 506.0}
    rows = [
        row("ours", "emptying", "free", 1.0, p99=19.0, **went),
        row("peer", "emptying", "free", 90.0, p99=190.0),
    ]
    (line,) = lines_of(alloc.table(data(*rows)), "as fast as it goes, 4 buffers")
    assert line == (
        "| as fast as it goes, 4 buffers | 1 / 19 / 9 | 90 / 190 / 810 | 10x | < 20 | pass | 30 / 506 of 512 | - |"
    )
    on_cpu = alloc.table(data(*rows, device="cpu", quick=True))
    assert "| 10x | - | - | 30 / 506" in on_cpu and on_cpu.endswith(", --quick, medians of 1 rounds.")


def test_failures_and_driver_calls_are_told():
    failed = {"who": "peer", "case": "holes", "round": 0, "figure": "holes", "failed": "no\n room"}
    table = alloc.table(data(row("ours", "reserve", "reserve-page", 4.0, driver_calls=0.25), failed))
    assert "* FAILED peer, holes, holes: no room" in table
    assert "* Driver calls in one: ours reserve-page (reserve) 0.25" in table
    assert alloc.table(data(failed)) == "nothing was measured\n* FAILED peer, holes, holes: no room"
    assert alloc.table(data()) == "nothing was measured"


# ---------------------------------------------------------------- the command


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench.alloc", *map(str, arguments)])
    alloc.main()


def test_the_command(fake, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out" / "alloc.json"
    command(monkeypatch, "--device", "cpu", "--quick", "--cases", "reserve", "--peer", fake, "--out", out)
    said = capsys.readouterr().out
    rows = [json.loads(line[7:]) for line in said.splitlines() if line.startswith("RESULT ")]
    found = json.loads(out.read_text())
    assert rows == found["rows"]
    figures = ["reserve-page", "reserve-one"]
    assert {(r["who"], r["figure"]) for r in rows} >= {(w, f) for w in ("ours", "peer") for f in figures}
    assert [about["who"] for about in found["about"]] == ["ours", "peer"]
    assert "[2/2] peer reserve, round 1" in said
    command(monkeypatch, "--tables", out)
    assert said.endswith(capsys.readouterr().out)


def test_a_budget_that_is_over(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="1"):
        command(monkeypatch, "--device", "cpu", "--quick", "--budget-s", "0")
    assert "the time is over in round 1 at ours sizes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "nothing"], "no such case; there are sizes partial"),
        (["--peer", "/nonexistent"], "there is no package kvcached in it"),
        (["--tables", "/nonexistent"], "/nonexistent"),
    ],
)
def test_arguments_that_cannot_be(monkeypatch, capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, *arguments)
    assert said in f"{end.value} {capsys.readouterr().err}"


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr("kvcached._core.backend_available", lambda device: f"no driver for {device}")
    with pytest.raises(SystemExit, match=r"cuda:0 cannot be used \(no driver for cuda:0\); --device cpu"):
        command(monkeypatch, "--device", "cuda:0")


def test_an_interrupt_shows_what_there_is(fake, tmp_path):
    out = tmp_path / "alloc.json"
    command_line = [
        sys.executable,
        "-m",
        "bench.alloc",
        "--device",
        "cpu",
        "--seconds",
        "0.01",
        "--rounds",
        "50",
    ]
    process = subprocess.Popen(
        [*command_line, "--cases", "reserve", "--peer", str(fake), "--out", str(out)],
        cwd=processes.ROOT,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore it, and with them what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors == ""
    assert "\ninterrupted after " in said and f"kept in {out}" in said
    assert lines_of(said, "a page through the reserve, one block")

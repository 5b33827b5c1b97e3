"""Real engines of vLLM's CPU build, natively and on kvcached, in this process.

An engine reads our settings when it is constructed, so that native and elastic ones can live in one process; the
patches that the first elastic one applied pass every native one through.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",  # a tiny model: more threads only wait for each other when the machine is busy
)

pytest.importorskip("vllm", reason="vLLM is not installed here")

from demo import model
from kvcached import _core, instance
from kvcached.integration.vllm import plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A warning with a traceback (there is no tokenizer to warm up), which pytest would keep, and with it the engine.
logging.getLogger("vllm.renderers.base").setLevel(logging.ERROR)

BLOCK_TOKENS = 32


def prompt(seed: int, length: int) -> list[int]:
    return [1] + [3 + (seed * 131 + k * (2 * seed + 3)) % 1000 for k in range(length - 1)]


SHARED = prompt(99, 150)
#: Two batches; the second meets what the first has left in the prefix cache.
BATCHES = [
    [prompt(i, 20 + 35 * i) for i in range(6)] + [SHARED + prompt(i, 30) for i in range(2)],
    [SHARED + prompt(i, 20 + 10 * i) for i in range(4)] + [prompt(i, 20 + 35 * i) for i in range(2, 6)],
]


@dataclass
class Outcome:
    """What one engine made of the batches."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    hits: list[list[int]] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)


class Engine:
    """One vLLM engine; elastic or not is for its environment to say."""

    def __init__(self, model_folder: str, **arguments: Any) -> None:
        import vllm

        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,  # prompts are prefilled in chunks
            "block_size": BLOCK_TOKENS,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        self.llm = vllm.LLM(model=model_folder, **defaults | arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    @property
    def is_elastic(self) -> bool:
        return hasattr(self.block_pool, "ledger")

    @property
    def pool(self) -> _core.Pool:
        return self.block_pool.ledger.pool

    def generate(self, prompts: list[list[int]], max_tokens: int = 40) -> tuple[list[list[int]], list[int]]:
        """Tokens and prefix-cache hits (tokens) of each prompt."""
        import vllm

        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False
        )
        return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens or 0 for o in outputs]

    def run(self, batches: list[list[list[int]]] = BATCHES) -> Outcome:
        outcome = Outcome()
        for batch in batches:
            tokens, hits = self.generate(batch)
            outcome.tokens.append(tokens)
            outcome.hits.append(hits)
            outcome.preemptions.append(self.preemptions)
        return outcome

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.scheduler, self.block_pool
        gc.collect()


@contextlib.contextmanager
def settings(**variables: str) -> Iterator[None]:
    """Ours, and no others, for as long as an engine is constructed."""
    before = {name: os.environ.pop(name) for name in list(os.environ) if "KVCACHED" in name}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def name_taken(name: str) -> Iterator[None]:
    """Another instance has this name. The record of this process, which exists if an engine ran before, is forgotten meanwhile."""
    taken = _core.InstanceRecord(name, "test", "cpu")
    records = dict(instance._records)
    instance._records.clear()
    try:
        yield
    finally:
        instance._records.clear()
        instance._records.update(records)
        taken.close()


ELASTIC = {
    "ENABLE_KVCACHED": "true",
    "KVCACHED_STRICT": "1",
    "KVCACHED_PAGE_MB": "4",
    "KVCACHED_MAX_RESERVED_MB": "8",
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model.write(tmp_path_factory.mktemp("model") / "tiny", "tiny"))


@pytest.fixture
def native(model_folder: str) -> Iterator[Callable[..., Engine]]:
    """Makes native engines; shut down after the test."""
    yield from _engines(model_folder, {})


@pytest.fixture
def elastic(model_folder: str) -> Iterator[Callable[..., Engine]]:
    """Makes elastic engines; `env` overrides settings. Shut down after the test, nothing may be left of them."""
    plugin_installed()
    yield from _engines(model_folder, ELASTIC)
    assert _core.live_ranges() == 0, "a range of addresses outlived its engine"


def plugin_installed() -> None:
    with settings(**ELASTIC):
        plugin.register()


def _engines(model_folder: str, variables: dict[str, str]) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(env: dict[str, str] | None = None, **arguments: Any) -> Engine:
        with settings(**variables | (env or {})):
            engine = Engine(model_folder, **arguments)
        made.append(engine)
        assert engine.is_elastic is bool(variables)
        return engine

    yield make
    while made:
        engine = made.pop()
        if hasattr(engine, "llm"):
            engine.shutdown()
    del make
    gc.collect()


@pytest.fixture(scope="session")
def native_outcome(model_folder: str) -> Callable[..., Outcome]:
    """The batches on a native engine, by its arguments; each kind runs once a session."""
    known: dict[str, Outcome] = {}

    def outcome(**arguments: Any) -> Outcome:
        key = repr(sorted(arguments.items()))
        if key not in known:
            with settings():
                engine = Engine(model_folder, **arguments)
            assert not engine.is_elastic
            known[key] = engine.run()
            engine.shutdown()
        return known[key]

    return outcome


@pytest.fixture(scope="session")
def native_on_two_ranks(model_folder: str) -> Outcome:
    """What a native engine of two ranks makes of `two_ranks.PASSES`."""
    import two_ranks

    engine = two_ranks.start(model_folder, {})
    outcome = two_ranks.run(engine)
    engine.shutdown()
    assert any(outcome.hits[1]), "the second pass meets the first one's prefixes"
    return outcome

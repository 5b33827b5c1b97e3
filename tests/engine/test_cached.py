"""Cached prefixes of real engines: what goes when their memory is wanted, what the next requests still find, and by whom it may be asked."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import vllm
from conftest import BATCHES, BLOCK_TOKENS, SHARED, Engine, prompt
from test_block_pool import check, pages_that_would_empty

from kvcached.integration.memory import EngineMemory
from kvcached.integration.vllm import block_pool as overlay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4 << 20
ALL = 1 << 60
NO_RESERVE = {"KVCACHED_MAX_RESERVED_MB": "0"}


def memory_of(engine: Engine) -> EngineMemory:
    memory = EngineMemory.of(engine.scheduler.cache_config)
    assert memory is not None
    return memory


def mapped_pages(engine: Engine) -> int:
    """By the pool's own account and by what is really mapped."""
    assert engine.pool.quiesce()
    stats = engine.pool.stats()
    assert stats["retired_pages"] == 0
    assert (
        stats["mapped_bytes"]
        == engine.pool.ftensor.mapped_bytes
        == len(engine.pool.ftensor.mapped_pages()) * PAGE
    )
    return stats["mapped_bytes"] // PAGE


def pages_held(engine: Engine) -> int:
    pages = range(engine.pool.ftensor.num_pages)
    return sum(held > 0 for held, _ in engine.pool.get_page_occupancy(pages))


class Model:
    """What vLLM's prefix cache holds, kept beside it: the prefix that each block ends, by what was stored and evicted."""

    def __init__(self, engine: Engine) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}
        self.engine = engine
        pool = engine.block_pool
        store, take = pool.cache_full_blocks, pool.get_new_blocks

        def cache_full_blocks(*args: Any, **kwargs: Any) -> Any:
            bound = (
                dict(zip(("request", "blocks", "num_cached_blocks", "num_full_blocks"), args, strict=False))
                | kwargs
            )
            tokens = tuple(bound["request"].all_token_ids)
            for i in range(bound["num_cached_blocks"], bound["num_full_blocks"]):
                self.prefixes[bound["blocks"][i].block_id] = tokens[: (i + 1) * BLOCK_TOKENS]
            return store(*args, **kwargs)

        def get_new_blocks(count: int) -> Any:
            blocks = take(count)
            for block in blocks:
                self.prefixes.pop(block.block_id, None)
            return blocks

        pool.cache_full_blocks, pool.get_new_blocks = cache_full_blocks, get_new_blocks

    def hits(self, tokens: list[int]) -> int:
        """Tokens that a request finds: whole blocks from the start, the last token excepted."""
        known = set(self.prefixes.values())
        found = 0
        while found + BLOCK_TOKENS < len(tokens) and tuple(tokens[: found + BLOCK_TOKENS]) in known:
            found += BLOCK_TOKENS
        return found

    def evicted(self, pages: list[int]) -> None:
        for block_id in list(self.prefixes):
            if self.engine.pool.pages_of([block_id])[0] in pages:
                del self.prefixes[block_id]


def test_an_idle_engine_gives_whole_pages_and_later_hits_are_vllm_s(elastic, native_outcome):
    expected = dict(
        zip(
            map(tuple, chain(*BATCHES)),
            chain(*native_outcome(enable_prefix_caching=True).tokens),
            strict=True,
        )
    )
    engine = elastic(NO_RESERVE, enable_prefix_caching=True)
    memory, model = memory_of(engine), Model(engine)
    orders = [BATCHES[0], BATCHES[1], BATCHES[0][::-1], BATCHES[1]]
    missed = 0
    for round_, prompts in enumerate(orders):
        for tokens in prompts:  # one at a time: what each finds is known before
            predicted = model.hits(tokens)
            (got,), hits = engine.generate([tokens])
            assert (got, hits) == (expected[tuple(tokens)], [predicted])
            missed += round_ > 0 and predicted < (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        whole, mapped = pages_that_would_empty(engine.block_pool, engine.pool), mapped_pages(engine)
        wanted = max(1, len(whole) // 2)
        assert memory.cached_bytes >= len(whole) * PAGE
        assert memory.give_cached(wanted * PAGE, timeout_s=1) == wanted * PAGE
        model.evicted(whole[:wanted])
        assert mapped_pages(engine) == mapped - wanted
        check(engine.block_pool, engine.pool)
    assert missed > 4, "what was evicted is computed again"
    assert memory.give_cached(ALL, timeout_s=1) > 0
    assert memory.give_cached(ALL, timeout_s=1) == 0
    assert mapped_pages(engine) == 1, "what is left shares the null block's page"


def test_tokens_are_native_s_after_everything_was_evicted_between_passes(elastic, native_outcome):
    expected = native_outcome(enable_prefix_caching=True)
    engine = elastic(NO_RESERVE, enable_prefix_caching=True)
    for batch, tokens in zip(BATCHES, expected.tokens, strict=True):
        assert engine.generate(batch)[0] == tokens
        assert memory_of(engine).give_cached(ALL, timeout_s=1) > 0
        assert mapped_pages(engine) == 1
        check(engine.block_pool, engine.pool)


@contextlib.contextmanager
def hurried_threads() -> Iterator[None]:
    """Python changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


class Steward(threading.Thread):
    """Asks for pages again and again; keeps what it was given and what went wrong."""

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__(name="steward")
        self.memory, self.given, self.ended = memory, [], threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.ended.wait(0.002):
                self.given.append(self.memory.give_cached(2 * PAGE, timeout_s=0.05))
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.ended.set()
        self.join()
        if self.error is not None:
            raise self.error


def test_another_thread_evicts_while_requests_run(elastic, native_outcome):
    expected = native_outcome(enable_prefix_caching=True)
    engine = elastic(NO_RESERVE, enable_prefix_caching=True)
    steward = Steward(memory_of(engine))
    hits = 0
    with hurried_threads():
        steward.start()
        try:
            for _ in range(8):
                for batch, tokens in zip(BATCHES, expected.tokens, strict=True):
                    got, found = engine.generate(batch)
                    assert got == tokens
                    hits += sum(found)
        finally:
            steward.stop()
    assert hits > 0 and sum(given > 0 for given in steward.given) > 8
    check(engine.block_pool, engine.pool)
    assert engine.llm.reset_prefix_cache()
    assert mapped_pages(engine) == 1


class NoLock:
    """The mutant: a lock that keeps nobody out."""

    def acquire(self, timeout: float = 0) -> bool:
        return True

    def release(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("where", ["found, not touched yet", "chosen, not evicted yet"])
@pytest.mark.parametrize("mutant", [False, True], ids=["lock", "no-lock"])
def test_the_lock_keeps_an_eviction_out_of_a_step(elastic, monkeypatch, mutant, where):
    """At the two moments where they would meet, one side waits for the other, but not for long."""
    engine = elastic(NO_RESERVE, enable_prefix_caching=True)
    memory, pool = memory_of(engine), engine.block_pool
    first, _ = engine.generate([SHARED])
    if mutant:
        memory.at_rest = NoLock()  # type: ignore[assignment]
    found, evicted, chosen, touched = (threading.Event() for _ in range(4))
    lost = []
    look, touch, choose = (
        engine.scheduler.kv_cache_manager.get_computed_blocks,
        pool.touch,
        overlay.choose_pages,
    )

    def get_computed_blocks(request: Any) -> Any:
        computed = look(request)
        found.set()
        if where == "found, not touched yet":
            evicted.wait(0.3)
        else:
            chosen.wait(0.3)
        return computed

    def touching(blocks: Any) -> None:
        lost.extend(block for block in blocks if block.block_hash is None)
        touch(blocks)
        touched.set()

    def choosing(*args: Any) -> Iterator[int]:
        pages = list(choose(*args))
        chosen.set()
        if where != "found, not touched yet":
            touched.wait(0.3)
        return iter(pages)

    evict, wrong = pool.evict, []

    def evicting(nbytes: int) -> int:
        before = pages_held(engine)
        given = evict(nbytes)
        if given != (before - pages_held(engine)) * PAGE:
            wrong.append(given)
        return given

    errors = []

    def steward() -> None:
        found.wait(10)
        try:
            memory.give_cached(ALL, timeout_s=10)
        except Exception as error:
            errors.append(error)
        evicted.set()

    monkeypatch.setattr(overlay, "choose_pages", choosing)
    engine.scheduler.kv_cache_manager.get_computed_blocks, pool.touch = get_computed_blocks, touching
    pool.evict = evicting
    thread = threading.Thread(target=steward)
    thread.start()
    try:
        tokens, hits = engine.generate([SHARED])
        harm = bool(errors or lost or wrong) or tokens != first
    except Exception as error:
        harm = "an engine that failed" and error is not None
    thread.join()
    assert harm is mutant
    if not mutant:
        assert hits == [128]
        check(pool, engine.pool)


def test_every_call_that_reaches_blocks_holds_the_lock(elastic, monkeypatch):
    """Requests with and without hits, chunks, preemptions, aborts, statistics and resets: nothing reaches the pool or its queue without."""
    classes = overlay._elastic_classes()
    free, calls = [], set()
    holders: dict[int, EngineMemory] = {}

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            memory = holders.get(id(self))
            if memory is not None:
                calls.add(name)
                if not memory.at_rest._is_owned():  # type: ignore[attr-defined]
                    free.append(name)
            return method(self, *args, **kwargs)

        return call

    engine = elastic(
        NO_RESERVE, enable_prefix_caching=True, disable_log_stats=False, num_gpu_blocks_override=30
    )
    for each in classes:
        for name in {name for base in each.__mro__[:2] for name in vars(base)}:
            method = getattr(each, name)
            if callable(method) and not name.startswith("__"):
                monkeypatch.setattr(each, name, watched(name, method))
    memory = memory_of(engine)
    holders |= {id(engine.block_pool): memory, id(engine.block_pool.free_block_queue): memory}
    engine.run()
    core = engine.llm.llm_engine
    sampling = vllm.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    for name in ("a", "b", "c"):
        core.add_request(name, {"prompt_token_ids": prompt(ord(name), 100)}, sampling)
    for _ in range(4):
        core.step()
    core.abort_request(["a"])
    core.step()
    engine.core.scheduler.make_stats()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    core.step()
    core.abort_request(["b", "c"])
    assert engine.llm.reset_prefix_cache()
    assert free == []
    assert engine.preemptions > 0
    assert calls >= {
        *("get_new_blocks", "free_blocks", "touch", "get_cached_block", "cache_full_blocks"),
        *("get_num_free_blocks", "reset_prefix_cache", "popleft_n", "remove", "append_n", "prepend_n"),
        *("get_usage", "take_events", "keep_to_cap", "_maybe_evict_cached_block"),
    }
    holders.clear()


@pytest.mark.parametrize("tokens", [0, 200, 1000])
def test_the_cap_of_cached_tokens_holds_after_each_step(elastic, native_outcome, tokens):
    expected = native_outcome(enable_prefix_caching=True)
    engine = elastic(NO_RESERVE | {"KVCACHED_MAX_CACHED_TOKENS": str(tokens)}, enable_prefix_caching=True)
    step, seen = engine.core.step_fn, []

    def stepping() -> Any:
        result = step()
        seen.append(engine.block_pool.free_block_queue.num_free_blocks * BLOCK_TOKENS)
        return result

    engine.core.step_fn = stepping
    got = engine.run()
    assert got.tokens == expected.tokens
    assert max(seen) <= tokens
    assert (max(seen) > 0) == (tokens > 0)
    check(engine.block_pool, engine.pool)
    assert mapped_pages(engine) <= 1 + -(-tokens // BLOCK_TOKENS)
    if tokens == 0:
        assert sum(got.hits[1]) <= 3 * 128, "only what is in use at the same time is found"
        assert mapped_pages(engine) == 1


def test_an_engine_that_was_aborted_gives_what_it_cached(elastic):
    engine = elastic(NO_RESERVE, enable_prefix_caching=True)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    for i, tokens in enumerate(BATCHES[0]):
        engine.llm.llm_engine.add_request(str(i), {"prompt_token_ids": tokens}, sampling)
    for _ in range(6):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request([str(i) for i in range(len(BATCHES[0]))])
    memory = memory_of(engine)
    assert memory.cached_bytes > 0
    assert memory.give_cached(ALL, timeout_s=1) > 0
    assert mapped_pages(engine) == 1
    check(engine.block_pool, engine.pool)


def test_an_engine_that_has_ended_gives_nothing_and_stays_for_nobody(elastic):
    engine = elastic(enable_prefix_caching=True)
    engine.generate([SHARED])
    memory = memory_of(engine)
    engine.shutdown()
    assert (memory.cached_bytes, memory.give_cached(ALL, timeout_s=1)) == (0, 0)
    gc.collect()

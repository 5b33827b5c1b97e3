"""Workers in processes of their own: one scheduler, and the same pages on every rank. All tests share one engine."""

from __future__ import annotations

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import worker_side
from conftest import ELASTIC, Engine
from two_ranks import DEADLINE_S, PASSES, are_gone, ask, run, start

from kvcached import _core
from kvcached.integration.memory import EngineMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 1 << 20  # two blocks of 32 tokens


def common_pages(engine: Engine) -> list[int]:
    """The pages that have memory, which must be the same on all ranks."""
    assert engine.pool.quiesce()
    first, *others = ask(engine, worker_side.mapped_pages)
    assert others == [first]
    return first


@pytest.fixture(scope="module")
def elastic(model_folder: str) -> Iterator[Engine]:
    engine = start(model_folder, ELASTIC | {"KVCACHED_MAX_RESERVED_MB": "0", "KVCACHED_PAGE_MB": "1"})
    assert engine.is_elastic
    yield engine
    if hasattr(engine, "llm"):
        engine.shutdown()
    gc.collect()


def test_the_same_tokens_and_hits_as_natively(native_on_two_ranks, elastic):
    got = run(elastic)
    assert got.tokens == native_on_two_ranks.tokens
    assert got.hits == native_on_two_ranks.hits


def test_all_ranks_reserve_the_same(elastic):
    assert _core.live_ranges() == 0, "the scheduler's process has no memory of its own"
    first, second = ask(elastic, worker_side.geometry)
    assert first == second
    blocks = elastic.scheduler.cache_config.num_gpu_blocks
    rows = elastic.pool.id_space
    assert rows > blocks == elastic.pool.num_blocks
    assert ask(elastic, worker_side.counts) == [(blocks, rows, rows)] * 2


def test_memory_rises_and_falls_on_all_ranks_together(elastic, capfd):
    import vllm

    assert elastic.llm.reset_prefix_cache()
    assert common_pages(elastic) == [0], "nothing but the null block's page at rest"
    llm_engine = elastic.llm.llm_engine
    sampling = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for number, tokens in enumerate(PASSES[0]):
        llm_engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
    peak = 0
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
        pages = common_pages(elastic)
        assert elastic.pool.stats()["mapped_bytes"] == len(pages) * PAGE, "bytes are those of one rank"
        peak = max(peak, len(pages))
    assert peak > 6
    assert _core.kvctl(["list"]) == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if f"{os.getpid()} " in line]
    assert len(rows) == 1, "one record a process, whatever the number of its workers"
    assert elastic.llm.reset_prefix_cache()
    assert common_pages(elastic) == [0]


def test_cached_prefixes_leave_all_ranks_together(native_on_two_ranks, elastic):
    memory = EngineMemory.of(elastic.scheduler.cache_config)
    assert memory is not None
    assert elastic.llm.reset_prefix_cache()
    for prompts, tokens in zip(PASSES, native_on_two_ranks.tokens, strict=True):
        assert elastic.generate(prompts, max_tokens=12)[0] == tokens
        before = len(common_pages(elastic))
        with ThreadPoolExecutor() as other:  # a thread that may not call the workers by vLLM's way
            assert other.submit(memory.give_cached, 2 * PAGE, 1).result() == 2 * PAGE
        assert len(common_pages(elastic)) == before - 2
    assert memory.give_cached(1 << 60, timeout_s=1) > 0
    assert common_pages(elastic) == [0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_loses_its_pages_is_noticed(elastic, native_on_two_ranks, number):
    """What the comparison of tokens is worth."""
    schedule = elastic.scheduler.schedule
    steps = 0

    def forgetful(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 6:
            ask(elastic, worker_side.lose_pages, number)
        return schedule(*args)

    elastic.scheduler.schedule = forgetful
    try:
        got = run(elastic)
    finally:
        elastic.scheduler.schedule = schedule
    assert got.tokens != native_on_two_ranks.tokens
    assert run(elastic).tokens == native_on_two_ranks.tokens, "and whole again with an empty cache"


def test_a_layer_of_one_rank_shifted_by_a_block_is_noticed(elastic, native_on_two_ranks):
    """The last with this engine whose tokens count."""
    ask(elastic, worker_side.shift_a_layer, 1)
    assert run(elastic).tokens != native_on_two_ranks.tokens


def test_a_killed_worker_ends_the_engine_and_leaves_nothing(elastic):
    pids, addresses = ask(elastic, worker_side.process_id), ask(elastic, worker_side.address)
    assert all(Path(address).is_socket() for address in addresses)
    pool = elastic.pool
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"rank 1|cancelled|Executor failed"):
        for _ in range(100):
            elastic.generate(PASSES[0], max_tokens=12)
    assert time.monotonic() - begin < DEADLINE_S
    with pytest.raises(_core.StateConsistencyError, match="rank 1"):
        pool.reserve_demand(pool.backed_size() + 1)
    elastic.shutdown()
    assert are_gone(pids)
    assert not any(Path(address).exists() for address in addresses)

"""Where the memory is while requests come, end, are aborted or starve, and after the engine."""

from __future__ import annotations

import gc
import os

import pytest
import vllm
from conftest import BATCHES, Engine, prompt

from kvcached import _core

PAGE = 4 << 20
MAX_RESERVED = 8 << 20


def sampling(max_tokens: int) -> vllm.SamplingParams:
    return vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def add(engine: Engine, name: str, tokens: list[int], max_tokens: int = 40) -> None:
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling(max_tokens))


def step_all(engine: Engine) -> dict[str, list[int]]:
    """Steps until no request is left; tokens by name."""
    tokens = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


def assert_at_rest(engine: Engine) -> None:
    """Only the null block is held; the rest went back but for the reserve."""
    assert engine.pool.quiesce()
    stats = engine.pool.stats()
    assert stats["held_blocks"] == 1
    assert stats["in_use_pages"] == 1
    assert stats["retired_pages"] == stats["mapping_pages"] == stats["unmapping_pages"] == 0
    assert stats["used_bytes"] == PAGE
    assert stats["reserved_bytes"] <= MAX_RESERVED
    assert engine.pool.ftensor.mapped_bytes == stats["used_bytes"] + stats["reserved_bytes"]


def test_pages_go_back_when_requests_end(elastic):
    engine = elastic()
    assert_at_rest(engine)
    assert engine.pool.ftensor.mapped_bytes == PAGE, (
        "nothing but the null block's page before the first request"
    )
    peak = 0
    for i, tokens in enumerate(BATCHES[0]):
        add(engine, str(i), tokens)
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
        peak = max(peak, engine.pool.ftensor.mapped_bytes)
    assert peak > 4 * PAGE
    assert peak < engine.pool.ftensor.virtual_bytes / 8
    assert_at_rest(engine)


def test_cached_pages_stay_until_reset(elastic):
    engine = elastic(enable_prefix_caching=True)
    engine.run()
    cached = engine.pool.stats()["held_blocks"] - 1
    assert cached > 0
    assert engine.block_pool.get_usage() == 0, "cached blocks are free in vLLM's eyes"
    assert engine.llm.reset_prefix_cache()
    assert_at_rest(engine)
    _, hits = engine.generate(BATCHES[0])
    assert sum(hits) < 2 * len(BATCHES[0][6]), "the cache was really reset"


def test_counts_of_scheduler_and_worker_are_not_mixed(elastic):
    engine = elastic(num_gpu_blocks_override=100)
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    assert engine.block_pool.num_gpu_blocks == 100
    assert engine.scheduler.cache_config.num_gpu_blocks == 100
    assert engine.scheduler.kv_cache_config.num_blocks == 100
    rows = runner.kv_cache_config.num_blocks
    assert rows == engine.pool.id_space > 100
    # Numbers only in what pytest may print: to print a tensor is to read memory that is not there.
    storages = [(s.data_ptr(), s.nbytes()) for s in (cache.untyped_storage() for cache in runner.kv_caches)]
    nbytes = engine.pool.id_space * engine.pool.geometry.block_bytes
    assert {size for _, size in storages} == {nbytes}
    assert len({pointer for pointer, _ in storages}) == len(storages) == engine.pool.geometry.num_buffers


def test_abort_midway(elastic, native_outcome):
    expected = native_outcome(enable_prefix_caching=False).tokens[0]
    engine = elastic()
    for i, tokens in enumerate(BATCHES[0]):
        add(engine, str(i), tokens)
    for _ in range(8):
        engine.llm.llm_engine.step()
    held = engine.pool.stats()["held_blocks"]
    engine.llm.llm_engine.abort_request(["5", "7"])
    assert engine.pool.stats()["held_blocks"] < held
    tokens = step_all(engine)
    assert sorted(tokens) == ["0", "1", "2", "3", "4", "6"]
    assert all(tokens[name] == expected[int(name)] for name in tokens)
    assert_at_rest(engine)


def test_rebuilt_engine_leaks_nothing(elastic):
    for _ in range(2):
        engine = elastic()
        engine.generate([prompt(1, 40)], max_tokens=4)
        pool = engine.pool
        assert _core.live_ranges() == 1
        engine.shutdown()
        assert pool.ftensor.mapped_bytes == 0
        del engine, pool
        gc.collect()
        assert _core.live_ranges() == 0


def test_two_engines_at_once(elastic, native_outcome):
    expected = native_outcome(enable_prefix_caching=True)
    one, two = elastic(enable_prefix_caching=True), elastic(enable_prefix_caching=True)
    assert _core.live_ranges() == 2
    first = [one.generate(BATCHES[0]), two.generate(BATCHES[0])]
    second = [one.generate(BATCHES[1]), two.generate(BATCHES[1])]
    for batch, outputs in enumerate([first, second]):
        assert outputs == [(expected.tokens[batch], expected.hits[batch])] * 2
    for name in ("held_blocks", "in_use_pages", "used_bytes"):
        assert one.pool.stats()[name] == two.pool.stats()[name]


def test_kvctl_list(elastic, capfd):
    engine = elastic()
    engine.generate([prompt(1, 40)], max_tokens=4)
    assert _core.kvctl(["list"]) == 0
    lines = capfd.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith(f"vllm-{os.getpid()} ")]
    columns = ["NAME", "ENGINE", "PID", "DEVICE", "USED", "RESERVED", "VIRTUAL", "LIMIT", "MIN"]
    assert lines[0].split() == columns
    assert [line.split()[0] for line in lines if line.startswith(("DEVICE", "host"))] == ["DEVICE", "host"]
    assert "cpu" in row
    assert "4.00 MiB" in row
    assert "1.0" in row.split("MiB")[-1], "GiB of addresses"


NO_RESERVE = {"KVCACHED_MAX_RESERVED_MB": "0"}
"""The pool's own thread backs nothing ahead: it knows of no `ShortPool`."""


class ShortPool(_core.Pool):
    """A pool whose device has memory for `budget_pages` pages and no more."""

    budget_pages = 0
    refusals = 0

    def reserve_demand(self, n: int) -> int:
        assert self.quiesce()  # what is on its way back is room
        left = max(0, type(self).budget_pages - len(self.ftensor.mapped_pages()))
        possible = self.backed_size() + left * self.geometry.blocks_per_page
        type(self).refusals += n > possible
        return super().reserve_demand(min(n, possible))


@pytest.fixture
def short_pool(monkeypatch):
    monkeypatch.setattr(_core, "Pool", ShortPool)
    monkeypatch.setattr(ShortPool, "refusals", 0)

    def budget(pages: int) -> None:
        monkeypatch.setattr(ShortPool, "budget_pages", pages)

    return budget


@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "caching"])
def test_short_memory_preempts_and_evicts_and_loses_nothing(elastic, native_outcome, short_pool, caching):
    short_pool(7)  # 28 of 1024 blocks
    engine = elastic(NO_RESERVE, enable_prefix_caching=caching)
    got = engine.run()
    assert got.tokens == native_outcome(enable_prefix_caching=caching).tokens
    assert ShortPool.refusals > 0
    assert got.preemptions[-1] > 0
    assert engine.pool.ftensor.mapped_bytes <= 7 * PAGE
    if caching:
        assert engine.llm.reset_prefix_cache()
    assert_at_rest(engine)


def test_requests_wait_for_memory(elastic, native_outcome, short_pool):
    short_pool(1)  # the null block's page: three blocks of 32 tokens
    engine = elastic(NO_RESERVE)
    add(engine, "waits", BATCHES[0][5])  # 195 tokens
    for _ in range(30):
        assert not engine.llm.llm_engine.step()
    assert engine.scheduler.get_request_counts() == (0, 1)
    assert ShortPool.refusals >= 30
    short_pool(100)
    expected = native_outcome(enable_prefix_caching=False).tokens[0][5]
    assert step_all(engine) == {"waits": expected}
    assert_at_rest(engine)

"""The comparison of tokens must notice a wrong mapping, else it proves nothing."""

from __future__ import annotations

import ctypes

import torch
from conftest import BATCHES

from kvcached.integration.rank import RankMemory


def test_a_layer_shifted_by_one_block(elastic, native_outcome, monkeypatch):
    tensors = RankMemory.tensors

    def shifted(self: RankMemory) -> dict[str, torch.Tensor]:
        buffer = self.ftensor.buffers()[2]
        start = buffer.ptr - self.plan.agreement.block_bytes
        memory = (ctypes.c_char * buffer.nbytes).from_address(start)
        memory._owner = buffer
        name = self.plan.agreement.buffers[2]
        return tensors(self) | {name: torch.frombuffer(memory, dtype=torch.int8)}

    expected = native_outcome(enable_prefix_caching=True)
    monkeypatch.setattr(RankMemory, "tensors", shifted)
    engine = elastic(enable_prefix_caching=True)
    assert engine.run().tokens != expected.tokens


def test_held_pages_that_lose_their_memory(elastic, native_outcome):
    expected = native_outcome(enable_prefix_caching=False).tokens[0]
    engine = elastic()
    schedule = engine.scheduler.schedule
    steps = 0

    def forgetful(*args):
        nonlocal steps
        steps += 1
        if steps == 12:  # behind the pool's back, between two batches
            pages = [p for p in engine.pool.ftensor.mapped_pages() if p != 0]
            engine.pool.ftensor.unmap(pages)
            engine.pool.ftensor.map(pages)
        return schedule(*args)

    engine.scheduler.schedule = forgetful
    tokens, _ = engine.generate(BATCHES[0])
    assert steps > 12
    assert tokens != expected

"""The same tokens, the same prefix hits and the same preemptions as natively, exactly."""

from __future__ import annotations

import pytest

PLENTY = {}
FEW = {"num_gpu_blocks_override": 24}


@pytest.mark.parametrize("order", ["lowest", "highest"])
@pytest.mark.parametrize("blocks", [PLENTY, FEW], ids=["plenty", "few"])
@pytest.mark.parametrize("caching", [False, True], ids=["no-caching", "caching"])
def test_equal_to_native(elastic, native_outcome, caching, blocks, order):
    arguments = {"enable_prefix_caching": caching} | blocks
    expected = native_outcome(**arguments)
    engine = elastic({"KVCACHED_PAGE_ORDER": order}, **arguments)
    got = engine.run()
    assert got.tokens == expected.tokens
    assert got.hits == expected.hits
    assert got.preemptions == expected.preemptions
    # What the comparison is worth: hits where there is a cache, preemptions where there are few blocks.
    assert any(sum(hits) for hits in expected.hits) is caching
    assert (expected.preemptions[-1] > 0) is (blocks is FEW)


def test_one_block_a_page(elastic, native_outcome):
    arguments = {"enable_prefix_caching": True} | FEW
    engine = elastic({"KVCACHED_PAGE_MB": "1"}, **arguments)
    assert engine.pool.geometry.blocks_per_page == 1
    assert engine.run() == native_outcome(**arguments)


@pytest.mark.parametrize("blocks", [PLENTY, FEW], ids=["plenty", "few"])
def test_dense_ids_over_zeros(elastic, native_outcome, blocks):
    """What a backend gets of which nothing is known."""
    arguments = {"enable_prefix_caching": True} | blocks
    engine = elastic({"KVCACHED_LAYOUT": "per-layer", "KVCACHED_UNBACKED": "zero"}, **arguments)
    ftensor, geometry = engine.pool.ftensor, engine.pool.geometry
    assert (geometry.layout, ftensor.unbacked) == ("per-layer", "zero")
    assert geometry.runs_per_page == geometry.num_buffers > 1
    assert engine.run() == native_outcome(**arguments)


def test_a_proven_backend_gets_holes_and_one_handle_a_page(elastic):
    engine = elastic()
    assert (engine.pool.geometry.layout, engine.pool.ftensor.unbacked) == ("chunked", "hole")

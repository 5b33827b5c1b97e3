from __future__ import annotations

import gc

import pytest

from kvcached import _core


@pytest.fixture
def nothing_stays():
    """No range of addresses is left behind."""
    gc.collect()
    before = _core.live_ranges()
    yield
    gc.collect()
    assert _core.live_ranges() == before

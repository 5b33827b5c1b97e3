from __future__ import annotations

import gc
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING

import pytest

from kvcached import _core, instance

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def nothing_stays():
    """No range of addresses is left behind."""
    gc.collect()
    before = _core.live_ranges()
    yield
    gc.collect()
    assert _core.live_ranges() == before


@pytest.fixture
def own_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The directory of sockets of this test alone, in which none is left at its end. Its path is short: a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        sockets = pathlib.Path(folder) / "kvcached"
        yield sockets
        assert list(sockets.glob("*")) == []


@pytest.fixture
def alone() -> None:
    """This process shares no device meanwhile: its record, which exists if something was made here before, is closed."""
    record = instance._records.pop(os.getpid(), None)
    if record is not None:
        record.close()

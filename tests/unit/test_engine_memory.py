"""`EngineMemory` without an engine: the pool's epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvcached.errors import StateConsistencyError
from kvcached.integration.plan import Agreement
from tests.memories import reserved_memory
from tests.ranges import KIB, settled_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.integration.memory import EngineMemory

pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture
def memory() -> Iterator[EngineMemory]:
    """Reserved: pages of 4 blocks, 10 of them."""
    settings = SimpleNamespace(
        page_bytes=2 * 4 * 4 * KIB,
        layout="chunked",
        unbacked="hole",
        handle_cache_bytes=0,
        pool_options={"min_reserved_bytes": 0, "max_reserved_bytes": 0, "highest_pages_first": False},
    )
    made = reserved_memory(settings, Agreement(("k", "v"), 4 * KIB, 1, 40))
    yield made
    made.close()


def test_what_is_freed_leaves_when_the_latest_epoch_has_ended(memory):
    pool = memory.open_pool()
    ids = pool.alloc(20)
    first = memory.begin_epoch()
    pool.free(ids)
    second = memory.begin_epoch()
    assert first < second == memory.latest_epoch
    mapped = settled_pages(pool)
    assert len(mapped) == 6, "with page 0, where the null block lies"
    pool.free(pool.alloc(20))
    memory.release_through(first)
    assert settled_pages(pool) == mapped, "used again in the second"
    memory.release_through(second)
    assert settled_pages(pool) == [0]


def test_without_a_pool_there_are_no_epochs(memory):
    def refused() -> None:
        for call in (memory.begin_epoch, lambda: memory.release_through(0)):
            with pytest.raises(StateConsistencyError, match="the pool of this engine is not open"):
                call()
        assert memory.latest_epoch == 0

    refused()
    memory.open_pool()
    memory.close()
    refused()

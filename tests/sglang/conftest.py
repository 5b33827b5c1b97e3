"""SGLang's own classes on elastic memory in this process; whole engines run in processes of their own."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

os.environ.update(
    OMP_NUM_THREADS="1",
    TRITON_INTERPRET="1",  # the kernels that give out pages of more than one token
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    SGLANG_DEBUG_MEMORY_POOL="1",  # SGLang's own assertions in its paged allocator
)

pytest.importorskip("sglang", reason="SGLang is not installed here")

import torch
from bounded import BoundedPool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from kvcached import _core
from kvcached.integration.plan import Agreement
from kvcached.integration.sglang.allocator import make_elastic
from tests import memories

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.integration.memory import EngineMemory
    from kvcached.integration.sglang.allocator import ElasticAllocator


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines(names): whole engines whose outcome the test looks at")


BLOCKS_PER_PAGE = 4
USABLE_BLOCKS = 39  # with the null block ten full pages
BLOCK_BYTES = 4096


def native_allocator(page_size: int, usable_blocks: int = USABLE_BLOCKS, kv_pool: Any = None) -> Any:
    """SGLang's allocator of so many of its pages, as its configurator builds it."""
    size, dtype, device = usable_blocks * page_size, torch.float32, "cpu"
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kv_pool, need_sort=False)
    return PagedTokenToKVPoolAllocator(size, page_size, dtype, device, kv_pool, need_sort=False)


def reserved_memory(
    page_size: int,
    *,
    usable_blocks: int = USABLE_BLOCKS,
    buffers: tuple[str, ...] = ("k0", "v0"),
    max_reserved_bytes: int = 0,
    highest_pages_first: bool = False,
) -> EngineMemory:
    """What an engine agreed on: pages of four blocks. The ids have holes, as many as buffers - 1 in each page."""
    settings = SimpleNamespace(
        page_bytes=len(buffers) * BLOCKS_PER_PAGE * BLOCK_BYTES,
        layout="chunked",
        unbacked="hole",
        handle_cache_bytes=0,
        max_cached_tokens=None,
        pool_options={
            "min_reserved_bytes": 0,
            "max_reserved_bytes": max_reserved_bytes,
            "highest_pages_first": highest_pages_first,
        },
    )
    memory = memories.reserved_memory(
        settings, Agreement(buffers, BLOCK_BYTES, page_size, usable_blocks + 1), "sglang"
    )
    geometry = memories.rank_of(memory).ftensor.geometry
    assert geometry.ids_per_page > geometry.blocks_per_page == BLOCKS_PER_PAGE
    return memory


def elastic_allocator(page_size: int, kv_pool: Any = None, **options: Any) -> ElasticAllocator:
    """SGLang's allocator made elastic, over a `BoundedPool`. Close its memory."""
    memory = reserved_memory(page_size, **options)
    assert memory.plan is not None
    native = native_allocator(page_size, memory.plan.agreement.num_blocks - 1, kv_pool)
    with mock.patch.object(_core, "Pool", BoundedPool):
        return make_elastic(native, memory)


@pytest.fixture
def elastic() -> Iterator[Callable[..., ElasticAllocator]]:
    """`elastic_allocator`, closed after the test; at most `budget_pages` of memory."""
    made: list[ElasticAllocator] = []

    def make(page_size: int, *, budget_pages: int | None = None, **options: Any) -> ElasticAllocator:
        made.append(elastic_allocator(page_size, **options))
        if budget_pages is not None:
            made[-1].pool.budget_pages = budget_pages
        return made[-1]

    yield make
    for allocator in made:
        allocator.memory.close()

"""SGLang's allocators on a real NVIDIA GPU, where freed ids arrive late. Run by hand: `pytest tests/gpu` (CI has none)."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
pytest.importorskip("sglang", reason="SGLang is not installed here")

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402

from kvcached.config import Settings  # noqa: E402
from kvcached.integration.plan import Agreement  # noqa: E402
from kvcached.integration.sglang.allocator import make_elastic  # noqa: E402
from tests.memories import reserved_memory  # noqa: E402
from tests.ranges import settled_pages  # noqa: E402

TOKENS = 4096
BUSY_CYCLES = 2_000_000_000  # about a second


@pytest.fixture(params=[1, 16])
def allocator(request, monkeypatch):
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    page_size = request.param
    layers = tuple(f"{kind}{layer}" for layer in range(4) for kind in "kv")
    settings = Settings(max_reserved_mb=0, layout="chunked", unbacked="hole")
    agreement = Agreement(layers, 2048 * page_size, page_size, TOKENS // page_size + 1)
    memory = reserved_memory(settings, agreement, "sglang", "cuda:0")
    pool = SimpleNamespace()
    if page_size == 1:
        native = TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cuda", pool, need_sort=False)
    else:
        native = PagedTokenToKVPoolAllocator(TOKENS, page_size, torch.bfloat16, "cuda", pool, need_sort=False)
    made = make_elastic(native, memory)
    made.ask_device()
    warm = made.alloc(64 * page_size)
    made.free_segment(warm, start_pos=0)  # its kernels and pinned buffers are there now
    made.settle()
    torch.cuda.synchronize()
    yield made
    torch.cuda.synchronize()
    memory.close()


def test_whatever_the_gpu_does_the_scheduler_does_not_wait(allocator):
    indices = allocator.alloc(TOKENS // 2)
    assert indices.is_cuda and len(indices.unique()) == TOKENS // 2 and int(indices.min()) > 0
    torch.cuda.synchronize()
    begin = time.monotonic()
    torch.cuda._sleep(BUSY_CYCLES)
    allocator.free_segment(indices, start_pos=0)
    assert allocator.logical_size() == allocator.available_size() == TOKENS, "free for whoever counts"
    again = allocator.alloc(TOKENS // 2)
    assert time.monotonic() - begin < 0.3, "the other half needs no freed id"
    held = allocator.pool.held_size()
    allocator.collect()
    assert allocator.pool.held_size() == held, "the ids are still on their way"
    everything = allocator.alloc(TOKENS // 2)
    assert time.monotonic() - begin > 0.3, "these are the freed ones: worth the wait"
    assert len(torch.cat([again, everything]).unique()) == TOKENS


def test_a_page_stays_mapped_until_the_batch_that_was_launched_has_ended(allocator):
    indices = allocator.alloc(TOKENS)
    tensors = allocator.memory.ranks.tensors()
    rows = {
        name: raw.view(torch.bfloat16).view(-1, 1024)[indices.to(torch.int64)]
        for name, raw in tensors.items()
    }
    assert all(not bool(row.any()) for row in rows.values()), "new memory reads as zeros"
    mapped = settled_pages(allocator.pool)
    epoch = allocator.memory.begin_epoch()
    torch.cuda._sleep(BUSY_CYCLES)
    late = [raw.view(torch.bfloat16).view(-1, 1024)[indices].sum() for raw in tensors.values()]
    done = torch.cuda.Event()
    done.record()
    allocator.free_segment(indices, start_pos=0)
    allocator.collect(wait=True)  # also waits for the batch: the copy is queued behind it
    assert settled_pages(allocator.pool) == mapped, "its epoch has not ended"
    done.synchronize()
    allocator.memory.release_through(epoch)
    assert settled_pages(allocator.pool) == [0]
    assert [float(value) for value in late] == [0.0] * len(late)


def test_a_table_that_is_rewritten_after_the_free(allocator):
    table = allocator.alloc(TOKENS).to(torch.int32)
    before = table.clone()
    allocator.free_group_begin()
    for start in range(0, TOKENS, TOKENS // 4):
        allocator.free_segment(table[start : start + TOKENS // 4], start_pos=start)
    table.fill_(0)
    allocator.free_group_end()
    allocator.settle()
    assert allocator.logical_size() == TOKENS
    assert len(before.unique()) == TOKENS


def test_clear_while_ids_are_on_their_way(allocator):
    indices = allocator.alloc(TOKENS)
    torch.cuda._sleep(BUSY_CYCLES // 4)
    allocator.free_segment(indices[: TOKENS // 2], start_pos=0)
    allocator.clear()
    assert allocator.logical_size() == TOKENS
    assert settled_pages(allocator.pool) == [0]
    assert len(allocator.alloc(TOKENS).unique()) == TOKENS

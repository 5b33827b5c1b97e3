"""The core's tensors on a real NVIDIA GPU: both layouts, zeros, cells, halves, transactions. Run by hand: `pytest tests/gpu`."""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import threading
import time
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from kvcached import _core  # noqa: E402
from kvcached._core import FTensor, Geometry, Pool  # noqa: E402
from kvcached.errors import DriverError, StateConsistencyError  # noqa: E402
from tests.children import in_fork, run_script  # noqa: E402
from tests.ranges import LAYOUTS, Legacy, Same, views_of  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GRANULARITY = 2 * MIB
PAGE, BLOCK, BUFFERS = 16 * MIB, 64 * KIB, 8
# What the driver and torch take for themselves while a test runs: page tables, blocks of small tensors. What is told apart
# by it differs by three pages or more.
SLACK = 24 * MIB
# Queued work of some 0.2 s.
BUSY_CYCLES = 400_000_000

UNBACKED = ["hole", "zero"]


@pytest.fixture(scope="module", autouse=True)
def warm_kernels():
    warm("cuda:0")


def warm(device: str) -> None:
    """Load the kernels that the tests use, so that their code is not taken for a leak of ours."""
    flat = torch.zeros(2 * MIB, dtype=torch.int8, device=device)
    rows = flat.view(32, 64 * KIB)
    for tensor in (flat, rows, rows[:, :100], rows.view(torch.bfloat16), rows.view(torch.float16)):
        tensor.fill_(0)
        assert bool((tensor == 0).all()) and torch.equal(tensor, tensor.clone()) and not bool(tensor.any())
    for tensor in (flat, rows, rows[:, :100]):
        assert int(tensor.sum(dtype=torch.int64)) == 0
    flat.fill_(1).add_(1)
    rows[:, :100] = torch.randint(-100, 100, (32, 100), dtype=torch.int8, device=device)
    rows.view(torch.bfloat16)[:, :64] = torch.randn(32, 64, device=device).to(torch.bfloat16)
    torch.cat([flat[:64], flat[64:128]])
    assert not bool(torch.full((1024,), 1.0, device=device)[-1].isnan())
    with torch.cuda.device(device):
        torch.cuda._sleep(1000)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            flat.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            flat.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    # The driver's own: its first range, mapping and stream.
    ftensor = gpu_range(device=device, cache_bytes=PAGE, unbacked="zero")
    ftensor.map([0])
    ftensor.unmap([0])


@pytest.fixture(autouse=True)
def fresh():
    gc.collect()
    ranges, before = _core.live_ranges(), free_bytes()
    yield
    gc.collect()
    assert _core.live_ranges() == ranges
    assert free_bytes() >= before - 64 * MIB


def free_bytes(device: int = 0) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def gpu_range(
    layout: str = "chunked", *, num_pages: int = 16, device: str = "cuda:0", **options: Any
) -> FTensor:
    """Blocks of 64 KiB in pages of 16 MiB: 32 of them in each of 8 buffers."""
    geometry = Geometry.solve(
        BUFFERS, BLOCK, GRANULARITY, page_bytes=PAGE, layout=layout, tokens_per_block=16
    )
    assert geometry.page_bytes == PAGE and geometry.blocks_per_page == 32
    return FTensor(device, geometry, num_pages * 32, **options)


def tensors_of(ftensor: FTensor) -> list[Any]:
    return [torch.from_dlpack(buffer) for buffer in ftensor.buffers()]


def chunk(tensor: Any, geometry: Geometry, page: int) -> Any:
    """The rows of a page that have blocks, in one buffer."""
    return tensor[page * geometry.ids_per_page * geometry.block_bytes :][: geometry.chunk_bytes]


def chunks(ftensor: FTensor, page: int) -> list[Any]:
    return [chunk(tensor, ftensor.geometry, page) for tensor in tensors_of(ftensor)]


def all_of(ftensor: FTensor, page: int) -> Any:
    """Every byte of a page, padding too: a copy."""
    geometry, tensors = ftensor.geometry, tensors_of(ftensor)
    if geometry.layout == "chunked":
        return tensors[0][page * geometry.page_bytes :][: geometry.page_bytes].clone()
    run = geometry.run_bytes
    return torch.cat([tensor[page * run :][:run] for tensor in tensors])


def all_zeros(ftensor: FTensor) -> bool:
    """Of a range with zeros under it: every byte of every tensor, to the last row."""
    return not any(bool(tensor.any()) for tensor in tensors_of(ftensor))


# ---------------------------------------------------------------- views


@pytest.mark.parametrize("exporter", [lambda buffer: buffer, Legacy], ids=["versioned", "legacy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_the_shape_the_strides_and_the_address_of_the_layout(layout, exporter):
    ftensor = gpu_range(layout)
    base = ftensor.buffers()[0].ptr
    views = views_of(ftensor)
    assert len(views) == BUFFERS + 4 * BUFFERS + BUFFERS - 1
    for buffer, shape, strides, offset in views:
        assert (buffer.shape, buffer.strides, buffer.ptr) == (shape, strides, base + offset)
        assert buffer.__dlpack_device__() == (2, 0)  # kDLCUDA
        tensor = torch.from_dlpack(exporter(buffer))
        seen = tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr()
        assert seen == (torch.device("cuda", 0), torch.int8, shape, strides, base + offset)
    with pytest.raises(BufferError, match="copy=True"):
        ftensor.buffers()[0].__dlpack__(copy=True)
    with pytest.raises(BufferError, match="stays there"):
        ftensor.buffers()[0].__dlpack__(dl_device=(1, 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_view_writes_the_others_read(layout):
    ftensor = gpu_range(layout)
    geometry, ids = ftensor.geometry, ftensor.id_space
    ftensor.map([2, 5])
    row = geometry.block_id(5 * 32 + 3)
    tensors = tensors_of(ftensor)
    component = torch.from_dlpack(ftensor.component(1, 128, 256))
    halves = torch.from_dlpack(ftensor.halves(1)).view(2, ids, BLOCK)
    pattern = torch.arange(BLOCK, device="cuda").remainder(100).to(torch.int8)
    tensors[1][row * BLOCK : (row + 1) * BLOCK] = pattern
    assert torch.equal(halves[0, row], pattern)
    assert torch.equal(component[row], pattern[128:384])
    halves[1, row] = 7
    assert bool((tensors[2][row * BLOCK : (row + 1) * BLOCK] == 7).all())
    component[row] = -1
    assert bool((halves[0, row, 128:384] == -1).all())
    assert torch.equal(halves[0, row, 384:], pattern[384:])
    pattern[128:384] = -1
    # Nothing else of the two pages was written.
    total = sum(int(part.sum(dtype=torch.int64)) for page in (2, 5) for part in chunks(ftensor, page))
    assert total == int(pattern.sum(dtype=torch.int64)) + 7 * BLOCK


# ---------------------------------------------------------------- what lies under unbacked pages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_zero_whole_tensors_read_as_zeros_but_for_what_was_written(layout):
    ftensor = gpu_range(layout, unbacked="zero")
    views = views_of(ftensor)
    if layout == "chunked":
        last = ftensor.buffers()[-1]
        assert last.ptr + last.nbytes > ftensor.buffers()[0].ptr + ftensor.num_pages * PAGE

    def sums() -> set[int]:
        wide = [torch.from_dlpack(buffer) for buffer, _, _, _ in views]
        assert not any(bool(tensor[-1].any()) for tensor in wide)
        return {int(tensor.sum(dtype=torch.int64)) for tensor in wide}

    assert sums() == {0}
    ftensor.map([0, 7])
    assert sums() == {0}
    row = ftensor.geometry.block_id(7 * 32 + 31)
    for tensor in tensors_of(ftensor):
        tensor[row * BLOCK : (row + 1) * BLOCK] = 1
    # Chunked, the rows of a buffer pass through the others' chunks of the same page as well.
    ones = BUFFERS if layout == "chunked" else 1
    assert [int(t.sum(dtype=torch.int64)) for t in tensors_of(ftensor)] == [ones * BLOCK] * BUFFERS
    torch.cuda.synchronize()
    ftensor.unmap([7])
    assert sums() == {0}
    ftensor.unmap([0])
    assert sums() == {0}


@pytest.mark.parametrize("cache_bytes", [0, 3 * PAGE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_zeros_are_still_zeros_after_heavy_use(layout, cache_bytes):
    ftensor = gpu_range(layout, unbacked="zero", cache_bytes=cache_bytes)
    chance = random.Random(4)
    for step in range(15):
        pages = chance.sample(range(16), 5)
        ftensor.map(pages)
        assert all_zeros(ftensor)
        for page in pages:
            for part in chunks(ftensor, page):
                part.fill_(-1)
        mapped = [int(part.sum(dtype=torch.int64)) for page in pages for part in chunks(ftensor, page)]
        assert mapped == [-32 * BLOCK] * (5 * BUFFERS)
        ftensor.unmap(pages[:2])
        ftensor.prepare_unmap(step, pages[2:])
        assert all_zeros(ftensor)
        ftensor.commit_unmap(step)
        assert all_zeros(ftensor)
    assert ftensor.cached_bytes <= cache_bytes and ftensor.mapped_bytes == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("unbacked", "write"), [("zero", True), ("hole", False), ("hole", True)])
def test_touching_unbacked_rows_is_an_error_of_the_child_alone(unbacked, write, layout):
    touch = "bad.fill_(1)" if write else "assert not bad.any()"
    code = (
        "import torch; from kvcached._core import FTensor, Geometry\n"
        f"g = Geometry.solve({BUFFERS}, {BLOCK}, {GRANULARITY}, page_bytes={PAGE}, layout='{layout}')\n"
        f"f = FTensor('cuda:0', g, 16 * g.blocks_per_page, unbacked='{unbacked}'); f.map([1])\n"
        f"t = torch.from_dlpack(f.component(3, 0, 1024))\n"
        "good, bad = t[g.block_id(g.blocks_per_page)], t[g.block_id(2 * g.blocks_per_page)]\n"
        "good.fill_(1)\n"
        f"if '{unbacked}' == 'zero': assert int(t.sum(dtype=torch.int64)) == 1024\n"
        "torch.cuda.synchronize(); print('so far so good', flush=True)\n"
        f"{touch}; torch.cuda.synchronize(); print('NO ERROR')\n"
    )
    done = run_script(code)
    assert done.stdout == "so far so good\n", done.stderr[-2000:]
    assert done.returncode != 0
    assert "CUDA error" in done.stderr or "AcceleratorError" in done.stderr


# ---------------------------------------------------------------- memory


def holds(start: int, ftensor: FTensor, pages: int) -> bool:
    """Whether the device has this many pages less than at the start, and the zeros."""
    used = start - free_bytes() - ftensor.zero_bytes
    return abs(used - pages * PAGE) <= SLACK


@pytest.mark.parametrize("unbacked", UNBACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_follows_the_pages(layout, unbacked):
    start = free_bytes()
    ftensor = gpu_range(layout, num_pages=64, unbacked=unbacked)
    assert ftensor.zero_bytes == (ftensor.geometry.run_bytes if unbacked == "zero" else 0)
    assert holds(start, ftensor, 0)
    pages = list(range(0, 40, 2))
    ftensor.map(pages)
    assert holds(start, ftensor, 20) and ftensor.mapped_bytes == 20 * PAGE
    ftensor.unmap(pages[:5])
    assert holds(start, ftensor, 15)
    ftensor.prepare_unmap(1, pages[5:10])
    assert holds(start, ftensor, 15) and ftensor.retained_bytes == 5 * PAGE
    ftensor.commit_unmap(1)
    assert holds(start, ftensor, 10) and ftensor.retained_bytes == 0
    ftensor.prepare_unmap(2, pages[10:])
    ftensor.abort_unmap(2)
    assert holds(start, ftensor, 10)
    del ftensor
    assert start - free_bytes() <= SLACK


@pytest.mark.parametrize("unbacked", UNBACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_that_was_kept_comes_back_clean(layout, unbacked):
    """Written 0xFF (a NaN in every type), released into the cache while other streams are busy, mapped elsewhere."""
    ftensor = gpu_range(layout, unbacked=unbacked, cache_bytes=3 * PAGE)
    streams = [torch.cuda.Stream() for _ in range(2)]
    others = [torch.zeros(64 * MIB, dtype=torch.int8, device="cuda") for _ in streams]
    for turn in range(4):
        first = [0, 3, 5, 9, 10, 15]
        ftensor.map(first)
        for page in first:
            assert not any(bool(part.any()) for part in chunks(ftensor, page)), (turn, page)
            for part in chunks(ftensor, page):
                part.fill_(-1)
        torch.cuda.synchronize()
        for stream, other in zip(streams, others, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(BUSY_CYCLES)
                other.add_(1)
        held = torch.cuda.mem_get_info()[0]
        ftensor.unmap(first)
        assert ftensor.cached_bytes == 3 * PAGE and ftensor.mapped_bytes == 0
        assert abs(torch.cuda.mem_get_info()[0] - held - 3 * PAGE) <= SLACK
        second = [1, 3, 7]
        ftensor.map(second)
        assert ftensor.cached_bytes == 0
        with torch.cuda.stream(streams[turn % 2]):
            seen = [bool(part.any()) for page in second for part in chunks(ftensor, page)]
        assert seen == [False] * (3 * BUFFERS), turn
        if unbacked == "zero":
            torch.cuda.synchronize()
            assert all_zeros(ftensor)
        torch.cuda.synchronize()
        assert [int(other.sum(dtype=torch.int64)) for other in others] == [64 * MIB * (turn + 1)] * 2
        ftensor.unmap(second)
        free = free_bytes()
        assert ftensor.trim() == 3 * PAGE and ftensor.cached_bytes == 0
        assert free_bytes() - free >= 3 * PAGE - SLACK
    assert ftensor.leaked_bytes == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_holds_no_nan_after_others_and_we_wrote_nan(layout):
    ftensor = gpu_range(layout, num_pages=256)
    pages = list(range(256))
    for _ in range(2):
        dirt = torch.full((8 * GIB // 4,), float("nan"), device="cuda")
        assert bool(dirt[-1].isnan())
        torch.cuda.synchronize()
        del dirt
        torch.cuda.empty_cache()
        ftensor.map(pages)
        for page in pages[::17]:
            assert not bool(all_of(ftensor, page).any()), page
        if layout == "chunked":
            assert not bool(tensors_of(ftensor)[0].any())  # to its last row it lies in backed pages
        else:
            assert not any(bool(tensor.any()) for tensor in tensors_of(ftensor))
        for tensor in tensors_of(ftensor):
            for page in pages:
                chunk(tensor, ftensor.geometry, page).fill_(-1)
        torch.cuda.synchronize()
        ftensor.unmap(pages)


# ---------------------------------------------------------------- transactions


@pytest.mark.parametrize("unbacked", UNBACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_abort_brings_the_content_back_and_a_commit_does_not(layout, unbacked):
    ftensor = gpu_range(layout, unbacked=unbacked)
    ftensor.map(list(range(6)))
    written = {}
    for page in range(6):
        for number, part in enumerate(chunks(ftensor, page)):
            content = torch.randint(-100, 100, part.shape, dtype=torch.int8, device="cuda")
            part.copy_(content)
            written[page, number] = content
    torch.cuda.synchronize()

    def as_written(page: int) -> bool:
        parts = chunks(ftensor, page)
        return all(torch.equal(part, written[page, number]) for number, part in enumerate(parts))

    gone, stays = [5, 0, 2, 3], [1, 4]
    free = free_bytes()
    ftensor.prepare_unmap(1, gone)
    assert ftensor.mapped_pages() == stays and ftensor.pending_transaction == 1
    assert abs(free_bytes() - free) <= SLACK
    assert all(as_written(page) for page in stays)
    if unbacked == "zero":
        assert not any(bool(part.any()) for page in gone for part in chunks(ftensor, page))
    with pytest.raises(StateConsistencyError, match="not decided"):
        ftensor.map([0])
    with pytest.raises(StateConsistencyError, match="not decided"):
        ftensor.unmap([2])
    ftensor.abort_unmap(1)
    assert ftensor.mapped_pages() == list(range(6))
    assert all(as_written(page) for page in range(6))
    torch.cuda.synchronize()
    ftensor.prepare_unmap(2, gone)
    ftensor.commit_unmap(2)
    assert abs(free_bytes() - free - 4 * PAGE) <= SLACK
    with pytest.raises(StateConsistencyError, match="is committed"):
        ftensor.abort_unmap(2)
    ftensor.map(gone)
    assert not any(bool(part.any()) for page in gone for part in chunks(ftensor, page))
    assert all(as_written(page) for page in stays)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_replays_over_a_page_that_was_aborted_back(layout):
    ftensor = gpu_range(layout)
    ftensor.map([2])
    row = chunks(ftensor, 2)[3]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        row.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row.add_(1)
    torch.cuda.synchronize()
    row.fill_(5)
    torch.cuda.synchronize()
    ftensor.prepare_unmap(1, [2])
    ftensor.abort_unmap(1)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((row == 6).all())
    ftensor.prepare_unmap(2, [2])
    ftensor.commit_unmap(2)
    ftensor.map([2])
    graph.replay()
    torch.cuda.synchronize()
    assert bool((row == 1).all())
    del graph, row


def test_threads_back_pages_of_their_own_at_once():
    ftensor = gpu_range(cache_bytes=2 * PAGE)
    errors: list[BaseException] = []

    def body(page: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for turn in range(20):
                    assert ftensor.map([page]) == [page]
                    parts = chunks(ftensor, page)
                    assert not any(bool(part.any()) for part in parts), (page, turn)
                    for part in parts:
                        part.fill_(page + 1)
                    assert all(bool((part == page + 1).all()) for part in parts), (page, turn)
                    stream.synchronize()
                    ftensor.unmap([page])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(page,)) for page in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ftensor.mapped_pages() == [] and ftensor.quarantined_pages() == []
    del threads


# ---------------------------------------------------------------- cells and halves


class Model(NamedTuple):
    """Super-cells of a real model; the layers are fewer."""

    parts: list[tuple[tuple[int, ...], Any]]
    tokens_per_block: int


MODELS = {
    "DeepSeek-V3.2": Model([((64, 656), torch.uint8), ((64, 132), torch.uint8)], 64),
    "DeepSeek-V3.2 in bf16": Model([((64, 576), torch.bfloat16), ((64, 132), torch.uint8)], 64),
    "Mamba-2": Model([((3, 5376), torch.bfloat16), ((80, 64, 128), torch.float16)], 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_components_of_cells_do_not_overlap(name, layout):
    model, layers = MODELS[name], 3
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in model.parts]
    offsets, cell_bytes, align = Geometry.pack_cell([(size, 16) for size in sizes])
    geometry = Geometry.solve(
        layers,
        cell_bytes,
        GRANULARITY,
        layout=layout,
        tokens_per_block=model.tokens_per_block,
        cell_align=align,
    )
    m, stride = geometry.blocks_per_page, geometry.block_bytes
    ftensor = FTensor("cuda:0", geometry, 3 * m)
    ftensor.map([1])
    first = geometry.block_id(m)
    # The page by the book: chunks of m cells, each component at its offset, zeros between.
    laid = torch.zeros(geometry.page_bytes, dtype=torch.int8, device="cuda")
    cells = laid[: layers * m * stride].view(layers, m, stride)
    places = [(layer, place) for layer in range(layers) for place in range(len(sizes))]
    random.Random(2).shuffle(places)
    for layer, place in places:
        shape, dtype = model.parts[place]
        view = torch.from_dlpack(ftensor.component(layer, offsets[place], sizes[place]))
        typed = view.view(dtype).unflatten(1, shape)
        seen = tuple(typed.shape), typed[first].is_contiguous()
        assert seen == ((ftensor.id_space, *shape), True)
        content = torch.randint(-100, 100, (m, sizes[place]), dtype=torch.int8, device="cuda")
        typed[first : first + m] = content.view(dtype).unflatten(1, shape)
        cells[layer, :, offsets[place] : offsets[place] + sizes[place]] = content
    for layer, place in places:
        view = torch.from_dlpack(ftensor.component(layer, offsets[place], sizes[place]))
        expected = cells[layer, :, offsets[place] : offsets[place] + sizes[place]]
        assert torch.equal(view[first : first + m], expected), (layer, place)
    assert torch.equal(all_of(ftensor, 1), laid)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_are_the_halves_of_an_engines_tensor(layout):
    """`[2, ids, tokens, heads, head]`, as vLLM's FlashAttention takes it up to 0.22."""
    layers, tokens, heads, head = 3, 16, 8, 128
    block = tokens * heads * head * 2
    geometry = Geometry.solve(
        2 * layers, block, GRANULARITY, page_bytes=12 * MIB, layout=layout, tokens_per_block=tokens
    )
    m = geometry.blocks_per_page
    ftensor = FTensor("cuda:0", geometry, 8 * m)
    ids = ftensor.id_space
    caches = [
        torch.from_dlpack(ftensor.halves(2 * layer)).view(torch.bfloat16).view(2, ids, tokens, heads, head)
        for layer in range(layers)
    ]
    ftensor.map([6])  # one page id: keys and values of every layer
    assert ftensor.mapped_bytes == geometry.page_bytes
    first = geometry.block_id(6 * m)
    written = []
    for layer, cache in enumerate(caches):
        keys, values = cache.unbind(0)
        for number, half in ((2 * layer, keys), (2 * layer + 1, values)):
            address = half.data_ptr()
            assert address == ftensor.buffers()[number].ptr
            content = torch.randn(m, tokens, heads, head, device="cuda").to(torch.bfloat16)
            half[first : first + m] = content
            written.append(content)
    for part, content in zip(chunks(ftensor, 6), written, strict=True):
        assert torch.equal(part.view(torch.bfloat16).view(content.shape), content)
    slots = caches[1].view(2, ids * tokens, heads, head)
    assert torch.equal(slots[1, first * tokens : (first + m) * tokens], written[3].flatten(0, 1))
    torch.cuda.synchronize()
    ftensor.unmap([6])


# ---------------------------------------------------------------- creation


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tensors_of_a_whole_card_are_made_in_5_ms(layout):
    num_blocks = 128 * GIB // (64 * 32 * KIB)
    before = free_bytes()
    kept = []

    def create() -> float:
        start = time.perf_counter()
        geometry = Geometry.solve(
            64, 32 * KIB, GRANULARITY, layout=layout, tokens_per_block=16, num_blocks=num_blocks
        )
        ftensor = FTensor("cuda:0", geometry, num_blocks)
        tensors = tensors_of(ftensor)
        took = time.perf_counter() - start
        kept.append((ftensor, tensors))
        return took

    create()
    took = [create() for _ in range(5)]
    print(f"\n{layout}: a range of 128 GiB and its 64 tensors in ms:", [round(1e3 * t, 3) for t in took])
    assert all(ftensor.virtual_bytes >= 128 * GIB and len(tensors) == 64 for ftensor, tensors in kept)
    assert before - free_bytes() <= SLACK
    assert statistics.median(took) < 5e-3
    kept.clear()


# ---------------------------------------------------------------- lifetimes

HOLDERS = ("ftensor", "buffer", "capsule", "tensor")


@pytest.mark.parametrize("order", [HOLDERS, HOLDERS[::-1]])
def test_memory_lives_as_long_as_anything_over_it(order):
    start, before = free_bytes(), _core.live_ranges()
    ftensor = gpu_range()
    ftensor.map([0, 1, 2, 3])
    buffer = ftensor.buffers()[0]
    held: dict[str, Any] = {"ftensor": ftensor, "buffer": buffer, "capsule": buffer.__dlpack__()}
    held["tensor"] = torch.from_dlpack(buffer)
    held["tensor"][:4096] = 3
    del ftensor, buffer
    for name in order:
        gc.collect()
        assert _core.live_ranges() == before + 1 and start - free_bytes() >= 4 * PAGE - SLACK
        if "tensor" in held:
            assert int(held["tensor"][:4096].sum(dtype=torch.int64)) == 3 * 4096
        del held[name]
    gc.collect()
    assert _core.live_ranges() == before and start - free_bytes() <= SLACK


@pytest.mark.parametrize("order", list(itertools.permutations(("pool", "ftensor", "tensor"))))
def test_a_pool_gives_memory_back_and_leaves_addresses_to_tensors(order):
    start, before = free_bytes(), _core.live_ranges()
    ftensor = gpu_range()
    held: dict[str, Any] = {"ftensor": ftensor, "tensor": torch.from_dlpack(ftensor.buffers()[0])}
    held["pool"] = Pool(ftensor, max_reserved_bytes=0)
    assert len(held["pool"].alloc(5 * 32 + 1)) == 5 * 32 + 1
    assert start - free_bytes() >= 6 * PAGE - SLACK
    del ftensor
    for name in order:
        assert _core.live_ranges() == before + 1
        del held[name]
        gc.collect()
        if name == "pool":
            assert start - free_bytes() <= SLACK
    assert _core.live_ranges() == before


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_is_taken_once_or_not_at_all(version):
    before = _core.live_ranges()
    ftensor = gpu_range()
    capsules = [buffer.__dlpack__(max_version=version) for buffer in ftensor.buffers()]
    exporter = Same(ftensor.buffers()[0], version)
    del ftensor
    tensor = torch.from_dlpack(exporter)
    with pytest.raises((RuntimeError, ValueError), match=r"[Cc]apsule"):
        torch.from_dlpack(exporter)
    assert _core.live_ranges() == before + 1
    del capsules, exporter
    assert _core.live_ranges() == before + 1
    del tensor
    assert _core.live_ranges() == before


def test_many_threads_export_and_drop():
    before = _core.live_ranges()
    shared = gpu_range()
    shared.map([0])
    chunks(shared, 0)[0].fill_(1)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            for turn in range(6):
                own = gpu_range(LAYOUTS[turn % 2], num_pages=2, unbacked=UNBACKED[turn // 2 % 2])
                kept = [own.buffers()[number].__dlpack__(), torch.from_dlpack(own.buffers()[number])]
                for _ in range(50):
                    buffer = shared.buffers()[0]
                    kept += [
                        torch.from_dlpack(buffer),
                        torch.from_dlpack(Legacy(buffer)),
                        buffer.__dlpack__(),
                    ]
                assert int(kept[-2][:4096].sum(dtype=torch.int64)) == 4096
                del own
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    del threads
    gc.collect()
    assert _core.live_ranges() == before + 1  # the shared one


ENDS = {
    "in a module": "",
    "in a cycle": "import gc; gc.disable(); loop = [views]; loop.append(loop); del loop, views, c",
    "not taken, in a transaction": "c = [b.__dlpack__() for b in t.buffers()]; t.prepare_unmap(1, [0])",
    "with a pool and queued work": (
        "p = _core.Pool(t, max_reserved_bytes=0); ids = p.alloc(40)\n"
        "torch.cuda._sleep(400_000_000); c[0][: 1 << 16].fill_(2)"
    ),
}


@pytest.mark.parametrize("alive", ENDS.values(), ids=ENDS)
def test_an_interpreter_ends_quietly_with_tensors_alive(alive):
    fills = "" if "Pool" in alive else "t.map([0]); c[0][: 1 << 16].fill_(1)\n"
    code = (
        "import torch; from kvcached import _core\n"
        f"g = _core.Geometry.solve({BUFFERS}, {BLOCK}, {GRANULARITY}, page_bytes={PAGE})\n"
        "t = _core.FTensor('cuda:0', g, 512)\n"
        "z = _core.FTensor('cuda:0', g, 512, unbacked='zero', cache_bytes=1 << 26); z.map([3]); z.unmap([3])\n"
        "c = [torch.from_dlpack(b) for b in t.buffers()]\n"
        "views = [c[0], torch.from_dlpack(z.halves(0))]; assert not views[1].any() and z.cached_bytes\n"
        f"{fills}{alive}\n"
        "print('the end')\n"
    )
    done = run_script(code)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr[-2000:]
    # What torch itself may have to say is not ours.
    ours = [line for line in done.stderr.splitlines() if "kvcached" in line or "Error" in line]
    assert ours == []


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_its_end_changes_nothing():
    ftensor = gpu_range()
    pool = Pool(ftensor, max_reserved_bytes=0)
    ids = pool.alloc(40)
    rows = torch.from_dlpack(ftensor.component(2, 0, BLOCK))
    for block_id in ids:
        rows[block_id] = 5
    torch.cuda.synchronize()
    buffer, owner, before = ftensor.buffers()[0], os.getpid(), pool.stats()
    calls = [
        lambda: ftensor.map([9]),
        lambda: ftensor.unmap([0]),
        lambda: ftensor.prepare_unmap(1, [0]),
        lambda: ftensor.mapped_bytes,
        lambda: ftensor.synchronise(),
        lambda: ftensor.buffers(),
        lambda: buffer.__dlpack__(),
        lambda: pool.alloc(1),
        lambda: pool.free(ids),
        lambda: pool.stats(),
        lambda: pool.shutdown(),
        lambda: Pool(ftensor),
    ]

    def body() -> None:
        for number, call in enumerate(calls):
            with pytest.raises(DriverError, match=rf"\b{owner}\b"):
                pytest.fail(f"call {number} returned {call()!r}")

    assert in_fork(body) == (0, "")
    assert pool.stats() == before and all(bool((rows[block_id] == 5).all()) for block_id in ids)
    pool.free(ids)
    assert pool.quiesce() and ftensor.mapped_bytes == 0


# ---------------------------------------------------------------- two GPUs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("unbacked", UNBACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_range_on_another_gpu_than_the_current(layout, unbacked):
    warm("cuda:1")
    assert torch.cuda.current_device() == 0
    start = [free_bytes(0), free_bytes(1)]
    errors: list[BaseException] = []
    ready = threading.Barrier(3)

    def used() -> tuple[int, int]:
        return start[0] - free_bytes(0), start[1] - free_bytes(1)

    def body(number: int) -> None:
        try:
            assert torch.cuda.current_device() == 0
            ftensor = gpu_range(layout, device="cuda:1", unbacked=unbacked, cache_bytes=PAGE)
            pages = [number, 5 + number, 10 + number]
            assert ftensor.device == "cuda:1"
            assert ftensor.buffers()[0].__dlpack_device__() == (2, 1)
            ftensor.map(pages)
            assert torch.cuda.current_device() == 0
            parts = [part for page in pages for part in chunks(ftensor, page)]
            assert {part.device for part in parts} == {torch.device("cuda", 1)}
            assert not any(bool(part.any()) for part in parts)
            for part in parts:
                part.fill_(number + 1)
            assert all(bool((part == number + 1).all()) for part in parts)
            if unbacked == "zero":
                ones = BUFFERS * 3 * 32 * BLOCK if layout == "chunked" else 3 * 32 * BLOCK
                assert int(tensors_of(ftensor)[0].sum(dtype=torch.int64)) == (number + 1) * ones
            ready.wait(60)
            if number == 0:
                on_0, on_1 = used()
                assert on_0 <= SLACK and abs(on_1 - 9 * PAGE - 3 * ftensor.zero_bytes) <= SLACK
            ready.wait(60)
            torch.cuda.synchronize(1)
            ftensor.prepare_unmap(1, pages[1:])
            ftensor.abort_unmap(1)
            assert all(bool((part == number + 1).all()) for part in parts)
            torch.cuda.synchronize(1)
            ftensor.unmap(pages)
            assert ftensor.cached_bytes == PAGE
            ftensor.map([15])
            assert not any(bool(part.any()) for part in chunks(ftensor, 15))
            torch.cuda.synchronize(1)
            # A new tensor without a device says where torch and the driver's current context are.
            assert torch.cuda.current_device() == 0 and torch.zeros(1).cuda().device.index == 0
        except BaseException as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=body, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    del threads
    gc.collect()
    assert torch.cuda.current_device() == 0
    on_0, on_1 = used()
    assert on_0 <= SLACK and on_1 <= SLACK

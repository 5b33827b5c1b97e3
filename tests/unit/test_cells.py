"""Super-cells, and keys and values as halves of one tensor, on the host backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached._core import FTensor, Geometry
from kvcached.errors import GeometryError
from tests.ranges import GRANULARITY, KIB, LAYOUTS, MIB

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_stays")


class Cells:
    """Component views of every buffer, and every byte of the backed pages."""

    def __init__(
        self, components: list[tuple[int, int]], geometry: Geometry, num_blocks: int, **options: Any
    ):
        self.sizes = [nbytes for nbytes, _ in components]
        self.offsets, _, _ = Geometry.pack_cell(components)
        self.geometry = geometry
        self.ftensor = FTensor("cpu", geometry, num_blocks, **options)
        self.views = {
            (buffer, place): np.from_dlpack(self.ftensor.component(buffer, offset, nbytes))
            for buffer in range(geometry.num_buffers)
            for place, (offset, nbytes) in enumerate(zip(self.offsets, self.sizes, strict=True))
        }

    def raw(self, page: int) -> np.ndarray:
        """The bytes of a page: a copy."""
        geometry, buffers = self.geometry, self.ftensor.buffers()
        if geometry.layout == "chunked":
            return np.from_dlpack(buffers[0])[page * geometry.page_bytes :][: geometry.page_bytes].copy()
        run = geometry.run_bytes
        return np.concatenate([np.from_dlpack(buffer)[page * run :][:run] for buffer in buffers])

    def expected(self, page: int, rows: dict[tuple[int, int, int], np.ndarray]) -> np.ndarray:
        """A page in which each component holds its bytes and all else is zero, laid out by the book."""
        geometry = self.geometry
        laid = np.zeros(geometry.page_bytes, np.int8)
        for (buffer, place, block_id), content in rows.items():
            run, cell = divmod(block_id, geometry.ids_per_page)
            if run == page:
                at = buffer * geometry.chunk_bytes + cell * geometry.block_bytes + self.offsets[place]
                laid[at : at + len(content)] = content
        return laid


def content_of(number: int, nbytes: int) -> np.ndarray:
    """Bytes that no other number has, in any four that follow each other; none of them zero."""
    digits = [1 + number // 255**place % 255 for place in range(4)]
    return np.resize(np.array(digits, np.uint8).view(np.int8), nbytes)


def fill_and_compare(cells: Cells, pages: list[int], order: Callable[[list], list]) -> None:
    """Writes a value of its own through each component of each buffer of each block, then reads all of them back."""
    geometry, ftensor = cells.geometry, cells.ftensor
    assert ftensor.map(pages) == pages
    m = geometry.blocks_per_page
    blocks = [page * m + row for page in pages for row in range(m)]
    ids = [geometry.block_id(block) for block in blocks]
    places = order([(*key, block_id) for key in cells.views for block_id in ids])
    rows = {}
    for number, (buffer, place, block_id) in enumerate(places):
        rows[buffer, place, block_id] = content_of(number, cells.sizes[place])
        cells.views[buffer, place][block_id] = rows[buffer, place, block_id]
    for (buffer, place, block_id), content in rows.items():
        assert (cells.views[buffer, place][block_id] == content).all(), (buffer, place, block_id)
    # Padding, in cells and behind them, is nobody's.
    for page in pages:
        assert (cells.raw(page) == cells.expected(page, rows)).all()


COMPONENTS = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from([1, 2, 4, 16, 128, 512])), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=150)
@given(
    components=COMPONENTS,
    layout=st.sampled_from(LAYOUTS),
    buffers=st.integers(1, 4),
    num_blocks=st.integers(1, 200),
    page_kib=st.integers(1, 96),
    unbacked=st.sampled_from(["hole", "zero"]),
    random=st.randoms(use_true_random=False),
)
def test_components_of_random_cells_do_not_overlap(
    components, layout, buffers, num_blocks, page_kib, unbacked, random
):
    _, cell_bytes, cell_align = Geometry.pack_cell(components)
    geometry = Geometry.solve(
        buffers,
        cell_bytes,
        GRANULARITY,
        page_bytes=page_kib * KIB,
        layout=layout,
        cell_align=cell_align,
    )
    assert geometry.content_bytes == cell_bytes
    assert geometry.block_bytes % cell_align == 0
    cells = Cells(components, geometry, num_blocks, unbacked=unbacked)
    for (_, place), view in cells.views.items():
        address, strides = view.ctypes.data, view.strides
        assert address % components[place][1] == 0 and strides == (geometry.block_bytes, 1)
    pages = random.sample(range(cells.ftensor.num_pages), min(3, cells.ftensor.num_pages))

    def shuffled(places: list) -> list:
        # A page may hold some thousand cells: those at its ends and some between.
        if len(places) > 600:
            places = [*places[:100], *random.sample(places[100:-100], 400), *places[-100:]]
        random.shuffle(places)
        return places

    fill_and_compare(cells, pages, shuffled)


class Model(NamedTuple):
    """Super-cells of a real model; the layers are fewer."""

    parts: dict[str, tuple[tuple[int, ...], Any]]
    tokens_per_block: int

    def components(self) -> list[tuple[int, int]]:
        return [(int(np.prod(shape)) * dtype.itemsize, 16) for shape, dtype in self.parts.values()]


MODELS = {
    # vLLM keeps 656 bytes a token of the latent (fp8_ds_mla) and 132 of the indexer's key, 64 tokens a block.
    "DeepSeek-V3.2": Model({"latent": ((64, 656), torch.uint8), "indexer": ((64, 132), torch.uint8)}, 64),
    "DeepSeek-V3.2 in bf16": Model(
        {"latent": ((64, 576), torch.bfloat16), "indexer": ((64, 132), torch.uint8)}, 64
    ),
    # 2.7B: 80 heads of 64, state 128, one group; convolution of 4 over 5120 + 2 * 128 channels.
    "Mamba-2": Model({"conv": ((3, 5376), torch.bfloat16), "ssm": ((80, 64, 128), torch.float16)}, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_components_of_real_cells_are_tensors_of_the_engines_shape(name, layout):
    model, layers = MODELS[name], 3
    components = model.components()
    offsets, cell_bytes, cell_align = Geometry.pack_cell(components)
    geometry = Geometry.solve(
        layers,
        cell_bytes,
        2 * MIB,
        layout=layout,
        tokens_per_block=model.tokens_per_block,
        cell_align=cell_align,
    )
    assert geometry.waste_bytes * 2 < geometry.page_bytes
    cells = Cells(components, geometry, 3 * geometry.blocks_per_page)
    ids = cells.ftensor.id_space

    def tensor(layer: int, place: int) -> Any:
        shape, dtype = list(model.parts.values())[place]
        flat = torch.from_dlpack(cells.ftensor.component(layer, offsets[place], components[place][0]))
        return flat.view(dtype).unflatten(1, shape)

    cells.ftensor.map([1])
    first = geometry.block_id(geometry.blocks_per_page)
    written = {}
    for layer in range(layers):
        for place, (shape, dtype) in enumerate(model.parts.values()):
            view = tensor(layer, place)
            seen = view.shape, view.dtype, view.stride(0) * dtype.itemsize, view[first].is_contiguous()
            assert seen == ((ids, *shape), dtype, geometry.block_bytes, True)
            for row in range(min(geometry.blocks_per_page, 4)):
                value = torch.randint(0, 100, shape).to(dtype)
                view[first + row] = value
                written[layer, place, first + row] = value
    assert len(written) >= 2 * layers
    for (layer, place, row), value in written.items():
        assert torch.equal(tensor(layer, place)[row], value), (layer, place, row)
    rows = {
        (layer, place, row): value.flatten().view(torch.int8).numpy()
        for (layer, place, row), value in written.items()
    }
    assert (cells.raw(1) == cells.expected(1, rows)).all()


def test_cells_that_cannot_be_are_refused():
    for components in ([], [(0, 16)], [(16, 3)], [(2**64 - 1, 16)]):
        with pytest.raises(GeometryError):
            Geometry.pack_cell(components)
    assert Geometry.pack_cell([(10, 4), (20, 16), (1, 1)]) == ([0, 16, 36], 48, 16)


# ---------------------------------------------------------------- halves


@settings(deadline=None, max_examples=150)
@given(
    layout=st.sampled_from(LAYOUTS),
    layers=st.integers(1, 4),
    tokens=st.sampled_from([1, 8, 16]),
    heads=st.integers(1, 4),
    head=st.sampled_from([8, 64]),
    num_blocks=st.integers(1, 120),
    page_kib=st.integers(1, 128),
    random=st.randoms(use_true_random=False),
)
def test_keys_and_values_are_the_halves_of_an_engines_tensor(
    layout, layers, tokens, heads, head, num_blocks, page_kib, random
):
    """`[2, ids, tokens, heads, head]`, as vLLM's FlashAttention takes it up to 0.22."""
    block = tokens * heads * head * 2
    geometry = Geometry.solve(2 * layers, block, GRANULARITY, page_bytes=page_kib * KIB, layout=layout)
    ftensor = FTensor("cpu", geometry, num_blocks)
    ids = ftensor.id_space
    caches = []
    for layer in range(layers):
        flat = torch.from_dlpack(ftensor.halves(2 * layer))
        caches.append(flat.view(torch.bfloat16).view(2, ids, tokens, heads, head))
    buffers = [torch.from_dlpack(buffer) for buffer in ftensor.buffers()]
    page = random.randrange(ftensor.num_pages)
    before = ftensor.mapped_bytes
    ftensor.map([page])  # one page id: keys and values of every layer
    assert ftensor.mapped_bytes - before == geometry.page_bytes
    m = geometry.blocks_per_page
    blocks = sorted({page * m, page * m + m - 1, page * m + random.randrange(m)})
    written = {}
    for layer, cache in enumerate(caches):
        keys, values = cache.unbind(0)
        addresses = [view.data_ptr() for view in (keys, values)]
        assert addresses == [buffer.ptr for buffer in ftensor.buffers()[2 * layer :][:2]]
        for index in blocks:
            row = geometry.block_id(index)
            assert page in geometry.pages_of_row(row)
            for half, view in enumerate((keys, values)):
                content = torch.randn(tokens, heads, head).to(torch.bfloat16)
                view[row] = content
                written[2 * layer + half, row] = content
    for (buffer, row), content in written.items():
        raw = buffers[buffer][row * block : (row + 1) * block]
        assert torch.equal(raw.view(torch.bfloat16).view(tokens, heads, head), content), (buffer, row)
    assert len(written) == 2 * layers * len(blocks)
    ftensor.unmap([page])

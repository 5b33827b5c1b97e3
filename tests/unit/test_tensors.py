"""The core's tensors on the host backend, as numpy and torch see them: views, unbacked pages, lifetimes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import struct
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvcached import _core
from kvcached._core import FTensor, Pool
from kvcached.errors import KVCachedConfigError
from tests.children import dies_touching, in_fork, run_script
from tests.ranges import GRANULARITY, KIB, LAYOUTS, Legacy, Same, buffer_stride, host_range, views_of

torch = pytest.importorskip("torch")

# A fork of a process with threads is what some of these tests are about.
pytestmark = [
    pytest.mark.usefixtures("nothing_stays"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


class Seen(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    kind: str


def through_numpy(exporter: Any) -> tuple[np.ndarray, Seen]:
    view = np.from_dlpack(exporter)
    return view, Seen(view.shape, view.strides, view.ctypes.data, str(view.dtype))


def through_torch(exporter: Any) -> tuple[Any, Seen]:
    view = torch.from_dlpack(exporter)
    kind = str(view.dtype).removeprefix("torch.")
    return view, Seen(tuple(view.shape), view.stride(), view.data_ptr(), kind)


CONSUMERS = {"numpy": through_numpy, "torch": through_torch}


@pytest.mark.parametrize("exporter", [lambda buffer: buffer, Legacy], ids=["versioned", "legacy"])
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_the_shape_the_strides_and_the_address_of_the_layout(layout, consumer, exporter):
    ftensor = host_range(layout)
    base = ftensor.buffers()[0].ptr
    views = views_of(ftensor)
    assert len(views) == 4 + 4 * 4 + 3
    for buffer, shape, strides, offset in views:
        assert (buffer.shape, buffer.strides, buffer.ptr) == (shape, strides, base + offset)
        assert buffer.nbytes == np.prod(shape)
        _, seen = CONSUMERS[consumer](exporter(buffer))
        assert seen == Seen(shape, strides, base + offset, "int8")


def test_the_layouts_differ_where_ids_and_strides_do():
    chunked, per_layer = host_range("chunked"), host_range("per-layer")
    assert chunked.id_space == 13 * 16 and per_layer.id_space == 13 * 4  # 50 blocks in pages of 4
    # FlashAttention of vLLM up to 0.22 takes [2, ids, ...]: per layer it is one contiguous tensor.
    contiguous = [torch.from_dlpack(t.halves(0)).is_contiguous() for t in (per_layer, chunked)]
    assert contiguous == [True, False]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


def pointer_in(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_a_capsule_holds_what_dlpack_h_says(version):
    """Read by the struct of dlpack.h: a consumer may be kinder than the next."""
    assert ctypes.sizeof(DLTensor) == struct.calcsize("PiiiBBHPPQ")
    ftensor = host_range()
    capsule = ftensor.halves(1).__dlpack__(max_version=version)
    if version is None or version < (1, 0):
        tensor = DLTensor.from_address(pointer_in(capsule, b"dltensor"))
    else:
        managed = DLManagedTensorVersioned.from_address(pointer_in(capsule, b"dltensor_versioned"))
        assert (managed.major, managed.minor) == (1, 0)
        assert managed.flags == 0  # neither read-only nor a copy
        tensor = managed.tensor
    assert (tensor.device_kind, tensor.device_id) == (1, 0)  # kDLCPU
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 8, 1)  # kDLInt
    assert (tensor.data, tensor.byte_offset) == (ftensor.buffers()[1].ptr, 0)
    nbytes = ftensor.id_space * ftensor.geometry.block_bytes
    assert tensor.ndim == 2 and tensor.shape[:2] == [2, nbytes]
    assert tensor.strides[:2] == [buffer_stride(ftensor), 1]


def test_a_consumer_may_ask_for_a_view_and_not_for_a_copy():
    buffer = host_range().buffers()[0]
    assert np.from_dlpack(buffer).flags.writeable
    for from_dlpack in (np.from_dlpack, torch.from_dlpack):
        from_dlpack(buffer, copy=False)
        from_dlpack(buffer, device="cpu")
        with pytest.raises(BufferError, match="copy=True"):
            from_dlpack(buffer, copy=True)
    with pytest.raises(BufferError, match=re.escape("(1, 0)")):
        buffer.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match=re.escape("(1, 0)")):
        buffer.__dlpack__(dl_device=(1, 1))


def test_components_and_halves_that_are_not_there_are_refused():
    ftensor = host_range()
    block = ftensor.geometry.block_bytes
    for offset, nbytes in ((0, 0), (0, block + 1), (block, 1), (1, block), (2**64 - 1, 2)):
        with pytest.raises(KVCachedConfigError, match=f"block of {block}"):
            ftensor.component(0, offset, nbytes)
    for number in (4, 2**32 - 1):
        with pytest.raises(KVCachedConfigError, match="there is no buffer"):
            ftensor.component(number, 0, 1)
    for number in (3, 4, 2**32 - 1):
        with pytest.raises(KVCachedConfigError, match="there is no buffer"):
            ftensor.halves(number)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_view_writes_the_others_read(layout):
    ftensor = host_range(layout)
    geometry = ftensor.geometry
    ftensor.map([2, 5])
    block, ids = geometry.block_bytes, ftensor.id_space
    row = geometry.block_id(5 * geometry.blocks_per_page + 3)
    numpy_buffers = [np.from_dlpack(buffer) for buffer in ftensor.buffers()]
    torch_buffers = [torch.from_dlpack(Legacy(buffer)) for buffer in ftensor.buffers()]
    component = np.from_dlpack(ftensor.component(1, 64, 128))
    halves = torch.from_dlpack(ftensor.halves(1)).view(2, ids, block)

    numpy_buffers[1][row * block : (row + 1) * block] = np.arange(block) % 100
    assert halves[0, row].tolist() == (np.arange(block) % 100).tolist()
    assert component[row].tolist() == (np.arange(64, 192) % 100).tolist()
    halves[1, row] = 7
    assert (numpy_buffers[2][row * block : (row + 1) * block] == 7).all()
    component[row] = -1
    written = torch_buffers[1][row * block : (row + 1) * block]
    assert written[64:192].tolist() == [-1] * 128
    assert written[:64].tolist() == list(range(64)) and int(written[192]) == 92
    torch_buffers[2][row * block] = 9
    assert int(halves[1, row, 0]) == 9
    # Nothing else of the two pages was written.
    total = sum(np.count_nonzero(pages_of(view, ftensor, [2, 5])) for view in numpy_buffers)
    assert total == np.count_nonzero(numpy_buffers[1][row * block :][:block]) + block


def pages_of(view: np.ndarray, ftensor: FTensor, pages: list[int]) -> np.ndarray:
    """The chunks of these pages in one buffer."""
    geometry = ftensor.geometry
    step = geometry.ids_per_page * geometry.block_bytes
    return np.concatenate([view[page * step :][: geometry.chunk_bytes] for page in pages])


# ---------------------------------------------------------------- what lies under unbacked pages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_zero_whole_tensors_read_as_zeros_but_for_what_was_written(layout):
    def read_all() -> None:
        for buffer, _, _, _ in views_of(host_range(layout, num_blocks=200, unbacked="zero")):
            assert not np.from_dlpack(buffer).any()

    assert in_fork(read_all) == (0, "")  # where something is missing that is a fault
    ftensor = host_range(layout, num_blocks=200, unbacked="zero")
    assert ftensor.unbacked == "zero" and ftensor.zero_bytes == ftensor.geometry.run_bytes
    views = views_of(ftensor)
    if layout == "chunked":
        # The last rows of the last buffer reach into the page that is never backed.
        last = ftensor.buffers()[-1]
        assert last.ptr + last.nbytes > ftensor.buffers()[0].ptr + ftensor.num_pages * 64 * KIB

    def all_zeros() -> None:
        for buffer, _, _, _ in views:
            view, wide = np.from_dlpack(buffer), torch.from_dlpack(buffer)
            assert view.sum(dtype=np.int64) == 0, (buffer.shape, buffer.strides)
            assert int(wide.sum(dtype=torch.int64)) == 0
            assert not view[-1].any() and not wide[-1].any()

    all_zeros()
    ftensor.map([0, 7])
    all_zeros()
    geometry = ftensor.geometry
    row = geometry.block_id(7 * geometry.blocks_per_page)
    for buffer in ftensor.buffers():
        np.from_dlpack(buffer)[row * geometry.block_bytes :][: geometry.block_bytes] = 1
    for number, buffer in enumerate(ftensor.buffers()):
        # Chunked, the rows of a buffer pass through the others' chunks of the same page as well.
        ones = np.from_dlpack(buffer).sum(dtype=np.int64)
        chunks = geometry.num_buffers if layout == "chunked" else 1
        assert ones == chunks * geometry.block_bytes, number
    ftensor.unmap([7])
    all_zeros()
    ftensor.unmap([0])
    all_zeros()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unbacked", ["zero", "hole"])
def test_touching_unbacked_rows_ends_the_process_that_does(unbacked, layout):
    """In forks that make their own tensors: here it would end the test."""

    def touch(page: int, *, write: bool) -> None:
        ftensor = host_range(layout, unbacked=unbacked)
        ftensor.map([1])
        view = np.from_dlpack(ftensor.component(3, 0, 16))
        row = ftensor.geometry.block_id(page * ftensor.geometry.blocks_per_page)
        if write:
            view[row] = 1
        elif view[row].any():
            raise AssertionError("not zeros")

    assert in_fork(lambda: touch(1, write=True)) == (0, "")
    assert dies_touching(lambda: touch(2, write=True))
    if unbacked == "zero":
        assert in_fork(lambda: touch(2, write=False)) == (0, "")
    else:
        assert dies_touching(lambda: touch(2, write=False))


# ---------------------------------------------------------------- lifetimes

HOLDERS = ("ftensor", "buffer", "capsule", "array", "tensor")


@pytest.mark.parametrize(
    "order", [HOLDERS, HOLDERS[::-1], ("array", "ftensor", "capsule", "tensor", "buffer")]
)
def test_memory_lives_as_long_as_anything_over_it(order):
    before = _core.live_ranges()
    ftensor = host_range()
    ftensor.map([0])
    buffer = ftensor.buffers()[0]
    held: dict[str, Any] = {"ftensor": ftensor, "buffer": buffer, "capsule": buffer.__dlpack__()}
    held |= {"array": np.from_dlpack(buffer), "tensor": torch.from_dlpack(buffer)}
    held["array"][:4096] = 3
    del ftensor, buffer
    for name in order:
        gc.collect()
        assert _core.live_ranges() == before + 1
        if "tensor" in held:
            assert int(held["tensor"][:4096].sum()) == 3 * 4096
        if "array" in held:
            assert held["array"][:4096].sum() == 3 * 4096
        del held[name]
    gc.collect()
    assert _core.live_ranges() == before


@pytest.mark.parametrize("order", list(itertools.permutations(("pool", "ftensor", "tensor"))))
def test_a_pool_gives_memory_back_and_leaves_addresses_to_tensors(order):
    before = _core.live_ranges()
    ftensor = host_range()
    held: dict[str, Any] = {"ftensor": ftensor, "tensor": torch.from_dlpack(ftensor.buffers()[0])}
    held["pool"] = Pool(ftensor, max_reserved_bytes=0)
    free = _core.mem_info("cpu")[0]
    assert held["pool"].alloc(9) is not None
    assert free - _core.mem_info("cpu")[0] == 3 * 64 * KIB
    del ftensor
    for name in order:
        assert _core.live_ranges() == before + 1
        del held[name]
        gc.collect()
        if name == "pool":
            assert _core.mem_info("cpu")[0] == free
    assert _core.live_ranges() == before


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_capsules_that_nobody_takes(version):
    before = _core.live_ranges()
    ftensor = host_range()
    capsules = [b.__dlpack__(max_version=version) for b in ftensor.buffers() for _ in range(10)]
    del ftensor
    assert _core.live_ranges() == before + 1
    del capsules
    assert _core.live_ranges() == before


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_capsule_is_taken_once(consumer, version):
    before = _core.live_ranges()
    exporter = Same(host_range().buffers()[0], version)
    view, _ = CONSUMERS[consumer](exporter)
    for again in CONSUMERS.values():
        with pytest.raises((RuntimeError, ValueError), match=r"[Cc]apsule"):
            again(exporter)
    del exporter
    assert _core.live_ranges() == before + 1
    del view
    assert _core.live_ranges() == before


def test_many_threads_export_and_drop():
    before = _core.live_ranges()
    shared = host_range()
    shared.map([0])
    np.from_dlpack(shared.buffers()[0])[:4096] = 1
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            barrier.wait()
            kept: list[Any] = []
            for turn in range(100):
                own = host_range(LAYOUTS[turn % 2], unbacked=("hole", "zero")[turn // 2 % 2])
                for ftensor in (shared, own):
                    buffer = ftensor.buffers()[number % 4]
                    kept += [np.from_dlpack(buffer), torch.from_dlpack(Legacy(buffer)), buffer.__dlpack__()]
                if number % 4 == 0:
                    assert int(kept[-5][:4096].sum()) == 4096
                del kept[: turn % 13]
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
    "as torch tensors": "import torch; views += [torch.from_dlpack(t2.buffers()[1])]",
    "in a cycle": "import gc; gc.disable(); loop = [views]; loop.append(loop); del loop, views",
    "not taken": "capsules = [b.__dlpack__() for b in t.buffers()]",
    "for good": "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(views))",
    "read at exit": "import atexit; atexit.register(lambda: views[0][:1].any())",
    "with a pool": "p = _core.Pool(_core.FTensor('cpu', g, 50), max_reserved_bytes=0); ids = p.alloc(20)",
    "with a record": "r = _core.InstanceRecord('test-ends', 'test', 'cpu'); p = _core.Pool(t2, record=r); p.alloc(3)",
    "in a transaction": "t.prepare_unmap(1, [0]); t2.map([3]); t2.unmap([3]); assert t2.cached_bytes",
    "used by daemons": (
        "import threading, time\n"
        "p = _core.Pool(_core.FTensor('cpu', g, 50), max_reserved_bytes=0)\n"
        "def work():\n"
        "    while True: p.free(p.alloc(10)); np.from_dlpack(t.buffers()[0])\n"
        "[threading.Thread(target=work, daemon=True).start() for _ in range(3)]\n"
        "time.sleep(0.2)"
    ),
}


@pytest.mark.parametrize("alive", ENDS.values(), ids=ENDS)
def test_an_interpreter_ends_quietly_with_tensors_alive(alive):
    code = (
        "import numpy as np\n"
        "from kvcached import _core\n"
        f"g = _core.Geometry.solve(4, 4096, {GRANULARITY}, page_bytes=65536)\n"
        "t = _core.FTensor('cpu', g, 50); t.map([0])\n"
        "t2 = _core.FTensor('cpu', g, 50, unbacked='zero', cache_bytes=1 << 20)\n"
        "views = [np.from_dlpack(t.buffers()[0]), np.from_dlpack(t2.halves(0))]\n"
        f"{alive}\n"
        "print('the end')\n"
    )
    done = run_script(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def test_the_memory_of_this_machine_is_one_device() -> None:
    assert _core.identity("cpu") == "host"

"""The tensors of `kvcached.vmm_ops` on the host backend: real memory, seen through numpy."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcached import _core, vmm_ops
from kvcached.errors import (
    DriverUnavailableError,
    GeometryError,
    KVCachedConfigError,
    KVCachedError,
    StateConsistencyError,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh():
    vmm_ops.shutdown_kvcached()
    yield
    vmm_ops.shutdown_kvcached()
    gc.collect()
    assert _core.live_ranges() == 0


def numpy_views(group_id: int = 0) -> list[np.ndarray]:
    return [np.from_dlpack(buffer) for buffer in vmm_ops.get_ftensor(group_id).buffers()]


def memfd_blocks() -> int:
    """512-byte blocks behind this process's memfds."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):
                total += os.stat(f"/proc/self/fd/{fd}").st_blocks
        except FileNotFoundError:
            pass
    return total


def test_without_a_gpu_the_host_backend_is_chosen():
    if _core.backend_available("cuda") is None:
        pytest.skip("this machine has a GPU")
    assert vmm_ops.backend_name() == "host"
    vmm_ops.init_kvcached()
    assert vmm_ops.backend_name() == "host"
    with pytest.raises(DriverUnavailableError, match="libcuda"):
        vmm_ops.shutdown_kvcached()
        vmm_ops.init_kvcached("cuda:0")


def run_with_library(directory: Path, name: str, source: Path, code: str) -> None:
    """Run Python code in a process that finds the compiled source as library `name`."""
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", directory / name, source], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(directory)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_a_driver_without_our_functions_is_named_not_a_crash(tmp_path):
    """An old libcuda: stood in for by a library that has none of the functions."""
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    code = (
        "import kvcached\n"
        "from kvcached import _core, errors\n"
        "assert 'the driver has no cu' in _core.backend_available('cuda')\n"
        "assert kvcached.vmm_ops.backend_name() == 'host'\n"
        "try: kvcached.vmm_ops.init_kvcached('cuda:0')\n"
        "except errors.DriverUnavailableError as e: assert 'the driver has no cuInit' in str(e), e\n"
        "else: raise SystemExit('no error')\n"
    )
    run_with_library(tmp_path, "libcuda.so.1", source, code)


def test_without_rocm_an_amd_gpu_is_refused_by_name():
    if _core.backend_available("hip") is None:
        pytest.skip("this machine has libamdhip64")
    assert "libamdhip64" in _core.backend_available("hip:1")
    geometry = _core.Geometry.solve(2, 32 << 10, 4096)
    for call in (
        lambda: _core.granularity("hip:0"),
        lambda: _core.mem_info("hip:0"),
        lambda: _core.FTensor("hip:0", geometry, 8),
        lambda: vmm_ops.init_kvcached("hip:0"),
    ):
        with pytest.raises(DriverUnavailableError, match=r"libamdhip64\.so"):
            call()
    with pytest.raises(KVCachedConfigError, match=r'"hip:N"'):
        vmm_ops.init_kvcached("hip:x")


def test_tensors_of_an_amd_gpu(tmp_path):
    """The runtime is one of ours, whose memory is ordinary memory (crates/vmm/tests/fake_hip)."""
    source = Path(__file__).parents[2] / "crates/vmm/tests/fake_hip/runtime.c"
    code = (
        "import ctypes, sys; sys.modules['torch'] = None\n"  # one for ROCm takes such a device, and is not here
        "from kvcached import _core, vmm_ops\n"
        "assert _core.backend_available('hip') is None\n"
        "vmm_ops.init_kvcached('hip:1')\n"
        "assert vmm_ops.backend_name() == 'hip'\n"
        "total = 128 << 20\n"
        "assert _core.granularity('hip:1') == 2 << 20 and _core.mem_info('hip') == (total // 2, total // 2)\n"
        "assert _core.identity('hip:1') == 'GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1'\n"
        "vmm_ops.create_kv_tensors(1 << 24, 2, block_bytes=32 << 10)\n"
        "ftensor = vmm_ops.get_ftensor()\n"
        "buffer = ftensor.buffers()[0]\n"
        "assert ftensor.device == 'hip:1' and buffer.__dlpack_device__() == (10, 1)\n"
        "free = _core.mem_info('hip:1')[0]\n"
        "vmm_ops.map_to_kv_tensors([0])\n"
        "assert _core.mem_info('hip:1') == (free - ftensor.mapped_bytes, total)\n"
        "assert ctypes.string_at(buffer.ptr, 32 << 10) == bytes(32 << 10)\n"
        "vmm_ops.unmap_from_kv_tensors([0])\n"
        "assert _core.mem_info('hip:1') == (free, total)\n"
    )
    run_with_library(tmp_path, "libamdhip64.so", source, code)


def test_an_amd_gpu_gets_dense_ids_unless_told_otherwise(tmp_path):
    """Over the runtime that the crate's own tests bring: there is no such GPU here."""
    source = Path(__file__).parents[2] / "crates/vmm/tests/fake_hip/runtime.c"
    library = tmp_path / "libamdhip64.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    code = (
        "import os, sys; sys.modules['torch'] = None\n"
        "from kvcached import vmm_ops\n"
        "for layout in ('', 'per-layer', 'chunked'):\n"
        "    os.environ.pop('KVCACHED_LAYOUT', None)\n"
        "    if layout: os.environ['KVCACHED_LAYOUT'] = layout\n"
        "    vmm_ops.init_kvcached('hip:0')\n"
        "    assert vmm_ops.backend_name() == 'hip'\n"
        "    buffers = vmm_ops.create_kv_tensors(1 << 24, 2)\n"
        "    assert buffers[0].__dlpack_device__() == (10, 0)\n"
        "    assert vmm_ops.get_ftensor().geometry.layout == (layout or 'per-layer')\n"
        "    assert vmm_ops.map_to_kv_tensors([0]) == [0]\n"
        "    vmm_ops.unmap_from_kv_tensors([0])\n"
        "    del buffers\n"
        "    vmm_ops.shutdown_kvcached()\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_import_needs_neither_libcuda_nor_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kvcached\n"
        "kvcached.vmm_ops.init_kvcached('cpu')\n"
        "t = kvcached.vmm_ops.create_kv_tensors(1 << 24, 2, num_layers=2)\n"
        "assert type(t[0]).__name__ == 'Buffer', t\n"
        "assert not any('libcuda' in line or 'libamdhip' in line for line in open('/proc/self/maps'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pages_are_written_read_given_back_and_come_back_clean():
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(8 * MIB, 2, num_layers=3, num_kv_buffers=2, block_bytes=32 << 10)
    geometry = vmm_ops.get_ftensor().geometry
    views = numpy_views()
    assert len(views) == 6
    before = memfd_blocks()
    assert vmm_ops.map_to_kv_tensors([0, 1]) == [0, 1]
    assert vmm_ops.map_to_kv_tensors([1, 0]) == []
    assert (memfd_blocks() - before) * 512 <= 2 * geometry.page_bytes
    for number, view in enumerate(views):
        for page in (0, 1):
            at = geometry.block_id(page * geometry.blocks_per_page) * geometry.block_bytes
            chunk = view[at : at + geometry.chunk_bytes]
            assert not chunk.any()
            chunk[:] = number + 1
    # No buffer's chunk lies in another's: each still holds its own number.
    for number, view in enumerate(views):
        assert (view[: geometry.chunk_bytes] == number + 1).all()
    full = memfd_blocks()
    vmm_ops.unmap_from_kv_tensors([1])
    assert full - memfd_blocks() == geometry.num_buffers * geometry.chunk_bytes // 512
    vmm_ops.map_to_kv_tensors([1])
    at = geometry.block_id(geometry.blocks_per_page) * geometry.block_bytes
    assert not views[0][at : at + geometry.chunk_bytes].any()
    assert (views[0][: geometry.chunk_bytes] == 1).all()
    del view, views, chunk


def test_tensors_outlive_their_group_and_the_group_its_tensors():
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(4 * MIB, 1)
    vmm_ops.map_to_kv_tensors([0])
    view = numpy_views()[0]
    vmm_ops.shutdown_kvcached()
    gc.collect()
    assert _core.live_ranges() == 1
    view[:1024] = 7
    assert view[1023] == 7
    del view
    gc.collect()
    assert _core.live_ranges() == 0


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_that_nobody_takes_leaks_nothing(version):
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(4 * MIB, 1)
    for buffer in vmm_ops.get_ftensor().buffers():
        buffer.__dlpack__(max_version=version)


def test_torch_tensors_where_torch_is_installed():
    torch = pytest.importorskip("torch")
    vmm_ops.init_kvcached("cpu")
    tensors = vmm_ops.create_kv_tensors(4 * MIB, 2, num_layers=2)
    vmm_ops.map_to_kv_tensors([0])
    assert [t.dtype for t in tensors] == [torch.int8] * 4
    ftensor = vmm_ops.get_ftensor()
    assert tensors[0].numel() == ftensor.id_space * ftensor.geometry.block_bytes
    tensors[3][:8].view(torch.float16).fill_(1.5)
    assert tensors[3][:8].view(torch.float16).tolist() == [1.5] * 4


def test_errors_say_what_to_do():
    with pytest.raises(KVCachedConfigError, match="init_kvcached"):
        vmm_ops.map_to_kv_tensors([0])
    vmm_ops.init_kvcached("cpu")
    vmm_ops.init_kvcached("cpu")
    with pytest.raises(KVCachedConfigError, match="shutdown_kvcached"):
        vmm_ops.init_kvcached("cpu", page_size=1 << 24)
    with pytest.raises(KVCachedConfigError, match="group 3"):
        vmm_ops.map_to_kv_tensors([0], group_id=3)
    with pytest.raises(KVCachedConfigError, match="itemsize"):
        vmm_ops.create_kv_tensors(1001, 2)
    with pytest.raises(KVCachedConfigError, match="positive"):
        vmm_ops.create_kv_tensors(1024, 2, num_layers=0)
    vmm_ops.create_kv_tensors(4 * MIB, 2)
    with pytest.raises(KVCachedConfigError, match="another group_id"):
        vmm_ops.create_kv_tensors(4 * MIB, 2)
    with pytest.raises(ValueError, match="page"):
        vmm_ops.map_to_kv_tensors([10**6])
    with pytest.raises(StateConsistencyError):
        vmm_ops.unmap_from_kv_tensors([0])


def test_a_page_size_that_the_device_refuses_is_named():
    with pytest.raises(KVCachedConfigError, match=r"page_size=1000 .* 4096"):
        vmm_ops.init_kvcached("cpu", page_size=1000)
    with pytest.raises(KVCachedError, match="tpu"):
        vmm_ops.init_kvcached("tpu:0")


def test_both_layouts_take_and_give_back_the_same_pages(monkeypatch):
    for layout, handles in ((True, 1), (False, 4)):
        vmm_ops.init_kvcached("cpu", contiguous_layout=layout)
        with pytest.raises(KVCachedConfigError, match="layout: call shutdown_kvcached"):
            vmm_ops.init_kvcached("cpu", contiguous_layout=not layout)
        tensors = vmm_ops.create_kv_tensors(64 * MIB, 2, num_layers=2, block_bytes=64 << 10)
        ftensor = vmm_ops.get_ftensor()
        geometry = ftensor.geometry
        assert (geometry.layout, geometry.runs_per_page) == ("chunked" if layout else "per-layer", handles)
        assert vmm_ops.map_to_kv_tensors([1, 0]) == [1, 0]
        row = geometry.block_id(geometry.blocks_per_page) * geometry.block_bytes  # the first of page 1
        for number, tensor in enumerate(tensors):
            tensor[row] = number + 1
        assert [int(view[row]) for view in numpy_views()] == [1, 2, 3, 4]
        assert ftensor.mapped_bytes == 2 * geometry.page_bytes
        vmm_ops.unmap_from_kv_tensors([0, 1])
        del tensors, tensor, ftensor
        vmm_ops.shutdown_kvcached()
    monkeypatch.setenv("KVCACHED_LAYOUT", "per-layer")
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(4 * MIB, 2)
    assert vmm_ops.get_ftensor().geometry.layout == "per-layer"


@pytest.mark.parametrize(
    ("setting", "policy"), [(None, "zero"), ("auto", "zero"), ("zero", "zero"), ("hole", "hole")]
)
def test_what_lies_where_no_memory_is(monkeypatch, setting, policy):
    if setting is not None:
        monkeypatch.setenv("KVCACHED_UNBACKED", setting)
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(64 * MIB, 2)
    ftensor = vmm_ops.get_ftensor()
    assert ftensor.unbacked == policy
    if policy == "zero":
        before = memfd_blocks()
        assert not any(view.any() for view in numpy_views())
        assert memfd_blocks() == before  # reading zeros takes no memory


def test_released_memory_is_kept_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("KVCACHED_HANDLE_CACHE_MB", "64")
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(64 * MIB, 2)
    ftensor = vmm_ops.get_ftensor()
    vmm_ops.map_to_kv_tensors([0, 1])
    numpy_views()[0][:4096] = 5
    vmm_ops.unmap_from_kv_tensors([0, 1])
    assert (ftensor.cached_bytes, ftensor.mapped_bytes) == (2 * ftensor.geometry.page_bytes, 0)
    vmm_ops.map_to_kv_tensors([1, 0])
    assert ftensor.cached_bytes == 0
    assert not numpy_views()[0][:4096].any()


def test_unmapping_in_two_steps():
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(64 * MIB, 2)
    vmm_ops.map_to_kv_tensors([0, 1])
    view = numpy_views()[0]
    view[:8] = 9
    vmm_ops.prepare_unmap_from_kv_tensors([0, 1], 1)
    vmm_ops.prepare_unmap_from_kv_tensors([1, 0], 1)
    assert not view[:8].any()
    with pytest.raises(StateConsistencyError, match="page 0"):
        vmm_ops.map_to_kv_tensors([0])
    vmm_ops.abort_unmap_from_kv_tensors(1)
    vmm_ops.abort_unmap_from_kv_tensors(1)
    assert (view[:8] == 9).all()
    with pytest.raises(StateConsistencyError, match="transaction 1 is aborted"):
        vmm_ops.commit_unmap_from_kv_tensors(1)
    vmm_ops.abort_unmap_from_kv_tensors(2)  # it overtakes its prepare
    with pytest.raises(StateConsistencyError, match="transaction 2 is aborted"):
        vmm_ops.prepare_unmap_from_kv_tensors([0], 2)
    vmm_ops.prepare_unmap_from_kv_tensors([0, 1], 3)
    vmm_ops.commit_unmap_from_kv_tensors(3)
    vmm_ops.commit_unmap_from_kv_tensors(3)
    assert vmm_ops.get_ftensor().mapped_bytes == 0
    with pytest.raises(StateConsistencyError, match="never prepared"):
        vmm_ops.commit_unmap_from_kv_tensors(4)


def test_the_page_size_setting_holds_where_no_size_is_given(monkeypatch):
    monkeypatch.setenv("KVCACHED_PAGE_MB", "5")
    vmm_ops.init_kvcached("cpu")
    vmm_ops.create_kv_tensors(4 * MIB, 2, block_bytes=32 << 10)
    assert vmm_ops.get_ftensor().geometry.page_bytes == 5 * MIB
    vmm_ops.shutdown_kvcached()
    vmm_ops.init_kvcached("cpu", page_size=7 * MIB)
    vmm_ops.create_kv_tensors(4 * MIB, 2, block_bytes=32 << 10)
    assert vmm_ops.get_ftensor().geometry.page_bytes == 7 * MIB


def test_ids_over_int32_are_refused_at_creation():
    vmm_ops.init_kvcached("cpu")
    with pytest.raises(GeometryError, match=r"2\^31|int32"):
        vmm_ops.create_kv_tensors(1 << 44, 2, num_layers=64, block_bytes=4096, tokens_per_block=16)
    assert not vmm_ops.kv_tensors_created()

"""The tensors and the manager on a real NVIDIA GPU. Run by hand: `pytest tests/gpu` on a GPU machine (CI has none)."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import kvcached  # noqa: E402
from kvcached import _core, vmm_ops  # noqa: E402
from kvcached.errors import DriverError, KVCachedConfigError, KVCachePoolExhausted, StateConsistencyError  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module", autouse=True)
def warm_kernels():
    """Load the kernels that the tests use, so that their code is not taken for a leak of ours."""
    row = torch.zeros(1024, dtype=torch.int8, device="cuda")
    row.fill_(1).add_(1)
    assert row.any() and (row == 2).all() and int(torch.count_nonzero(row)) == 1024
    assert int(torch.stack([row.sum(dtype=torch.int64)] * 2).sum()) == 4096 and int(row.sum()) == 2048
    torch.full((1024,), float("nan"), device="cuda")
    torch.cuda._sleep(1000)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        row.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        row.add_(1)
    graph.replay()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setenv("KVCACHED_MAX_RESERVED_MB", "0")
    monkeypatch.setenv("KVCACHED_UNBACKED", "hole")
    torch.cuda.synchronize()
    vmm_ops.shutdown_kvcached()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    yield
    vmm_ops.shutdown_kvcached()
    gc.collect()
    torch.cuda.empty_cache()
    assert _core.live_ranges() == 0
    assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_the_gpu_is_chosen_and_its_memory_seen():
    assert _core.backend_available("cuda") is None
    assert vmm_ops.backend_name() == "cuda"
    assert _core.granularity("cuda:0") == 2 * MIB
    free, total = _core.mem_info("cuda:0")
    assert total == torch.cuda.mem_get_info()[1] and 0 < free <= total


def test_a_whole_card_of_addresses_costs_no_memory():
    before = free_bytes()
    tensors = vmm_ops.create_kv_tensors(
        4 * GIB, 2, "cuda:0", num_layers=32, block_bytes=32 << 10, tokens_per_block=16
    )
    assert len(tensors) == 64 and all(t.is_cuda and t.is_contiguous() for t in tensors)
    assert before - free_bytes() < 16 * MIB
    del tensors


def test_pages_are_written_read_given_back_and_come_back_clean():
    tensors = vmm_ops.create_kv_tensors(1 * GIB, 2, "cuda:0", num_layers=4, block_bytes=32 << 10)
    geometry = vmm_ops.get_ftensor().geometry
    pages = [0, 7, vmm_ops.get_ftensor().num_pages - 1]
    before = free_bytes()
    assert vmm_ops.map_to_kv_tensors(pages) == pages
    assert before - free_bytes() >= 3 * geometry.page_bytes

    def chunk(tensor, page):
        at = geometry.block_id(page * geometry.blocks_per_page) * geometry.block_bytes
        return tensor[at : at + geometry.chunk_bytes]

    for number, tensor in enumerate(tensors):
        for page in pages:
            assert not chunk(tensor, page).any()
            chunk(tensor, page).fill_(number + 1)
    for number, tensor in enumerate(tensors):
        for page in pages:
            assert bool((chunk(tensor, page) == number + 1).all())
    full = free_bytes()
    vmm_ops.unmap_from_kv_tensors(pages)
    assert free_bytes() - full >= 3 * geometry.page_bytes
    vmm_ops.map_to_kv_tensors(pages)
    assert not any(bool(chunk(t, p).any()) for t in tensors for p in pages)
    del tensors


def test_fresh_memory_holds_no_nan_after_other_tenants_wrote_nan():
    dirt = torch.full((4 * GIB // 4,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    del dirt
    torch.cuda.empty_cache()
    tensors = vmm_ops.create_kv_tensors(
        4 * GIB, 2, "cuda:0", num_layers=1, num_kv_buffers=1, block_bytes=64 << 10
    )
    pages = list(range(vmm_ops.get_ftensor().num_pages))
    vmm_ops.map_to_kv_tensors(pages)
    assert int(torch.count_nonzero(tensors[0])) == 0
    del tensors


def test_out_of_memory_is_pressure_and_changes_nothing():
    total = torch.cuda.mem_get_info()[1]
    vmm_ops.create_kv_tensors(2 * total, 2, "cuda:0", num_layers=1, num_kv_buffers=1, block_bytes=256 << 10)
    ftensor = vmm_ops.get_ftensor()
    before = free_bytes()
    with pytest.raises(KVCachePoolExhausted):
        ftensor.map(list(range(ftensor.num_pages)))
    assert ftensor.mapped_pages() == [] and ftensor.quarantined_pages() == []
    assert free_bytes() >= before - 16 * MIB
    manager = kvcached.KVCacheManager(ftensor.num_blocks, 16, 16384, 1, num_kv_buffers=1)
    assert manager.alloc(ftensor.num_blocks) is None
    assert manager.reserve_demand(ftensor.num_blocks) < ftensor.num_blocks
    assert len(manager.alloc(100)) == 100
    manager.shutdown()


def test_errors_are_typed():
    with pytest.raises(DriverError):
        _core.granularity("cuda:99")
    with pytest.raises(KVCachedConfigError, match="2097152"):
        vmm_ops.init_kvcached("cuda:0", page_size=4096)
    vmm_ops.create_kv_tensors(64 * MIB, 2, "cuda:0")
    with pytest.raises(StateConsistencyError):
        vmm_ops.unmap_from_kv_tensors([0])


def test_a_graph_replays_over_memory_mapped_anew():
    tensors = vmm_ops.create_kv_tensors(64 * MIB, 1, "cuda:0", num_kv_buffers=1, block_bytes=64 << 10)
    vmm_ops.map_to_kv_tensors([0])
    row = tensors[0][: 4 * MIB]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        row.add_(1)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row.add_(1)
    torch.cuda.synchronize()
    vmm_ops.unmap_from_kv_tensors([0])
    vmm_ops.map_to_kv_tensors([0])
    graph.replay()
    assert int(row.sum(dtype=torch.int64)) == 4 * MIB
    del graph, row, tensors


def test_a_retired_page_is_read_late_and_unharmed():
    """A kernel queued behind 0.2 s of work reads a page that was freed meanwhile: it must still be mapped."""
    manager = kvcached.KVCacheManager(1000, 16, 2048, 8, async_sched=True)
    tensor = torch.from_dlpack(manager.ftensor.buffers()[0])
    ids = manager.alloc(100)
    size = manager.geometry.block_bytes
    rows = [tensor[i * size : (i + 1) * size] for i in ids]
    for row in rows:
        row.fill_(3)
    torch.cuda.synchronize()
    epoch = manager.begin_epoch()
    torch.cuda._sleep(400_000_000)
    sums = torch.stack([row.sum(dtype=torch.int64) for row in rows])
    manager.free(ids)
    mapped = manager.ftensor.mapped_bytes
    assert mapped > 0
    assert sums.tolist() == [3 * size] * 100
    manager.release_through(epoch)
    assert manager.quiesce() and manager.ftensor.mapped_bytes == 0
    del row, rows, tensor
    manager.shutdown()


def test_mapping_from_a_thread_without_a_context():
    vmm_ops.create_kv_tensors(64 * MIB, 2, "cuda:0")
    errors = []

    def body():
        try:
            vmm_ops.map_to_kv_tensors([0])
            vmm_ops.unmap_from_kv_tensors([0])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert errors == []


def test_tensors_outlive_the_manager():
    manager = kvcached.KVCacheManager(100, 16, 2048, 4)
    tensors = [torch.from_dlpack(b) for b in manager.ftensor.buffers()]
    manager.alloc(10)
    vmm_ops.shutdown_kvcached()
    tensors[0][:1024].fill_(5)
    assert int(tensors[0][:1024].sum()) == 5 * 1024
    del manager
    gc.collect()
    assert _core.live_ranges() == 1
    del tensors


def test_touching_a_hole_is_an_error_of_the_child_alone():
    code = (
        "import torch; from kvcached import vmm_ops\n"
        "t = vmm_ops.create_kv_tensors(1 << 30, 2, 'cuda:0'); vmm_ops.map_to_kv_tensors([0])\n"
        "t[0][:4].fill_(1); torch.cuda.synchronize(); print('backed', flush=True)\n"
        "t[0][1 << 28 : (1 << 28) + 4].fill_(1); torch.cuda.synchronize(); print('NO ERROR')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "backed" in done.stdout and "NO ERROR" not in done.stdout and done.returncode != 0


def test_exit_with_tensors_alive():
    code = (
        "import torch; from kvcached import vmm_ops\n"
        "t = vmm_ops.create_kv_tensors(1 << 30, 2, 'cuda:0'); vmm_ops.map_to_kv_tensors([0]); t[0][:4].fill_(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_gpu_has_the_uuid_that_torch_sees() -> None:
    assert _core.identity("cuda:0") == f"GPU-{torch.cuda.get_device_properties(0).uuid}"

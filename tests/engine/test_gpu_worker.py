"""The GPU worker's seams, on fakes: warm-up with made-up block ids, and the memory profile."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest

from kvcached import _core
from kvcached.config import Settings
from kvcached.integration.memory import EngineMemory
from kvcached.integration.own_use import OwnUse
from kvcached.integration.plan import Agreement
from kvcached.integration.rank import RankMemory
from kvcached.integration.vllm import capacity, warmup
from tests.devices import Device
from tests.memories import attach, local_memory, rank_of, reserved_memory
from tests.ranges import settled_pages

GIB = 1 << 30
BLOCK = 8192
NUM_BLOCKS = 100


@pytest.fixture
def memory():
    settings = Settings(page_mb=1, layout="chunked", unbacked="hole")
    made = reserved_memory(settings, Agreement(tuple("abcd"), BLOCK, 16, NUM_BLOCKS), "vllm")
    yield made
    made.close()


@pytest.fixture
def rank(memory):
    return rank_of(memory)


def request(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(block_ids=(list(ids),))


def output(new=(), cached=()) -> SimpleNamespace:
    return SimpleNamespace(
        scheduled_new_reqs=list(new), scheduled_cached_reqs=SimpleNamespace(new_block_ids=list(cached))
    )


class TestWarmUp:
    @pytest.fixture
    def runner(self, rank):
        runner = SimpleNamespace(kv_cache_config=SimpleNamespace(num_blocks=rank.ftensor.id_space))
        rank.attach(runner.kv_cache_config)
        return runner

    def test_rows_are_backed_while_it_lasts(self, rank, runner):
        seen = []

        @warmup.back_made_up_blocks
        def warm_up(model_runner, worker_execute_model, worker_sample_tokens, *, prefix):
            assert model_runner.kv_cache_config.num_blocks == NUM_BLOCKS
            worker_execute_model(output(new=[request(1, 2), request(3)]))
            worker_execute_model(output(cached=[([98, 99],), None]))
            worker_execute_model(output())
            worker_sample_tokens(None)
            return prefix

        def execute_model(scheduler_output):
            # Really write every row of every layer that the batch names.
            ids = [i for r in scheduler_output.scheduled_new_reqs for i in r.block_ids[0]]
            ids += [i for g in scheduler_output.scheduled_cached_reqs.new_block_ids if g for i in g[0]]
            for layer in rank.plan.agreement.buffers:
                rows = rank.tensors()[layer].view(-1, BLOCK)
                for i in ids:
                    rows[i].fill_(1)
            seen.append(set(rank.ftensor.mapped_pages()))

        assert warm_up(runner, execute_model, lambda grammar: None, prefix="x") == "x"
        assert seen[0] < seen[1] == seen[2]
        assert rank.ftensor.mapped_pages() == [0]
        assert runner.kv_cache_config.num_blocks == rank.ftensor.id_space

    def test_all_is_taken_back_after_a_failure(self, rank, runner):
        @warmup.back_made_up_blocks
        def warm_up(model_runner, worker_execute_model):
            worker_execute_model(output(new=[request(*range(1, 90))]))
            raise RuntimeError("out of luck")

        with pytest.raises(RuntimeError, match="out of luck"):
            warm_up(runner, lambda scheduler_output: None)
        assert rank.ftensor.mapped_pages() == [0]
        assert runner.kv_cache_config.num_blocks == rank.ftensor.id_space

    def test_pages_of_a_pool_are_not_taken_from_it(self, memory, runner):
        pool = memory.open_pool()
        held = pool.alloc(40)
        mapped = settled_pages(pool)

        @warmup.back_made_up_blocks
        def warm_up(model_runner, worker_execute_model):
            worker_execute_model(output(new=[request(*range(1, 90))]))

        warm_up(runner, lambda scheduler_output: None)
        assert settled_pages(pool) == mapped
        pool.free(held)

    def test_native_engines_pass_through(self):
        @warmup.back_made_up_blocks
        def warm_up(model_runner, worker_execute_model):
            return worker_execute_model

        runner = SimpleNamespace(kv_cache_config=SimpleNamespace(num_blocks=5))
        assert warm_up(runner, len) is len


def snapshot(device: Device) -> SimpleNamespace:
    free = device.total - device.neighbour - device.context - device.reserved
    used = device.total - free
    return SimpleNamespace(
        free_memory=free,
        total_memory=device.total,
        cuda_memory=used,
        torch_memory=device.reserved,
        non_torch_memory=used - device.reserved,
        device_="cuda:0",
    )


def native_request_memory(init_snapshot, cache_config):
    wanted = int(init_snapshot.total_memory * cache_config.gpu_memory_utilization)
    if init_snapshot.free_memory < wanted:
        raise ValueError("Free memory on device is less than desired")
    return wanted


class TestBudget:
    @pytest.fixture
    def device(self, monkeypatch):
        device = Device(neighbour=100 * GIB, nvml=False)
        monkeypatch.setattr(OwnUse, "of_device", lambda _: device.own_use())
        return device

    @pytest.fixture
    def config(self):
        config = SimpleNamespace(gpu_memory_utilization=0.9)
        attach(local_memory(Settings(), "vllm"), config)
        return config

    def test_a_neighbour_is_no_reason_not_to_start(self, device, config):
        request_memory = capacity.budget_at_start(native_request_memory)
        taken = snapshot(device)
        assert request_memory(taken, config) == int(126 * GIB)
        assert taken.free_memory == 140 * GIB
        assert taken.non_torch_memory == 0

    def test_refused_engines_get_vllm_s_own_answer(self, device, config):
        request_memory = capacity.budget_at_start(native_request_memory)
        taken = snapshot(device)
        before = vars(taken).copy()
        request_memory(taken, config)
        rank = RankMemory.of(config)
        RankMemory.detach(config)
        with pytest.raises(ValueError, match="less than desired"):
            rank.refuse()
        assert vars(taken) == before
        with pytest.raises(ValueError, match="less than desired"):
            request_memory(taken, config)

    def test_the_profile_measures_this_process(self, device, config, monkeypatch):
        import torch

        def device_wide(*args):
            free = device.total - device.neighbour - device.context - device.reserved
            return free, device.total

        monkeypatch.setattr(torch.accelerator, "get_memory_info", device_wide)
        taken = snapshot(device)
        capacity.budget_at_start(native_request_memory)(taken, config)

        @capacity.measured_alone
        def determine_available_memory(worker):
            device.reserved += 20 * GIB  # weights and activations
            device.neighbour -= 90 * GIB  # and the neighbour leaves
            free = torch.accelerator.get_memory_info("cuda:0")[0]
            assert taken.free_memory >= free, "what kills vLLM natively"
            return 126 * GIB - (taken.free_memory - free)

        worker = SimpleNamespace(cache_config=config)
        assert determine_available_memory(worker) == 106 * GIB
        assert torch.accelerator.get_memory_info is device_wide


class TestMemoryAndConfigs:
    def test_copies_find_the_same_memory(self, memory, rank):
        config = SimpleNamespace(a=1)
        attach(memory, config)
        for copied in (copy.deepcopy(config), copy.copy(config)):
            assert EngineMemory.of(copied) is memory
            assert RankMemory.of(copied) is rank
        EngineMemory.detach(config)
        RankMemory.detach(config)
        assert EngineMemory.of(config) is None and RankMemory.of(config) is None

    def test_in_another_process_a_config_finds_a_rank_of_that_process(self, memory, rank):
        config = SimpleNamespace(a=1)
        attach(memory, config)
        sent = pickle.loads(pickle.dumps(config))
        assert EngineMemory.of(sent) is None, "there is one scheduler"
        other = RankMemory.of(sent)
        assert other is not rank and other.launch == rank.launch
        with pytest.raises(_core.StateConsistencyError, match="not reserved"):
            other.tensors()
        assert "plug-in did not run" in str(other.obstacle), "until they are in place there"

    def test_tensors_are_one_storage_a_layer(self, rank):
        pointers = set()
        for layer in rank.plan.agreement.buffers:
            tensor = rank.tensors()[layer]
            size = tensor.untyped_storage().nbytes()
            assert (size, tensor.dim(), tensor.storage_offset()) == (rank.ftensor.id_space * BLOCK, 1, 0)
            pointers.add(tensor.data_ptr())
        assert len(pointers) == 4

    def test_close_twice_and_after(self, memory, rank):
        memory.close()
        memory.close()
        with pytest.raises(_core.StateConsistencyError, match="closed"):
            rank.tensors()

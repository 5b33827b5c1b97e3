"""The pools as they are built: SGLang's own class on our addresses, every part looked at, native where that fails."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import BLOCK_BYTES, USABLE_BLOCKS, native_allocator, reserved_memory
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool

from kvcached import _core, instance
from kvcached.errors import StateConsistencyError, TermsError
from kvcached.integration.memory import EngineMemory
from kvcached.integration.refusal import UnsupportedConfiguration
from kvcached.integration.sglang import build, capacity
from kvcached.integration.sglang.pool import ElasticMHATokenToKVPool, agree
from tests.devices import GIB, Device
from tests.memories import attach, local_memory, rank_of

if TYPE_CHECKING:
    from kvcached.integration.rank import RankMemory

LAYERS = 3
HEADS = 2
BUFFERS = tuple(f"{kind}{layer}" for layer in range(LAYERS) for kind in "kv")


def arguments(page_size: int) -> dict:
    """Of SGLang's pool, as its configurator names them."""
    return {
        "page_size": page_size,
        "dtype": torch.float32,
        "head_num": HEADS,
        "head_dim": BLOCK_BYTES // page_size // HEADS // 4,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }


def native_pool(page_size: int, **others) -> MHATokenToKVPool:
    return MHATokenToKVPool(USABLE_BLOCKS * page_size, **arguments(page_size), **others)


@pytest.fixture(params=[1, 4])
def page_size(request) -> int:
    return request.param


@pytest.fixture
def memory(page_size):
    made = reserved_memory(page_size, buffers=BUFFERS)
    yield made
    made.close()


@pytest.fixture
def rank(memory):
    return rank_of(memory)


@pytest.fixture
def kv_pool(rank, page_size, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_ASYNC_ASSERT", "1")  # SGLang's own checks of indices
    return ElasticMHATokenToKVPool(
        USABLE_BLOCKS * page_size, **arguments(page_size), enable_kv_cache_copy=True, rank=rank
    )


def random_rows(count: int, page_size: int) -> torch.Tensor:
    return torch.randn(count, HEADS, arguments(page_size)["head_dim"])


def some_indices(rank: RankMemory, page_size: int) -> torch.Tensor:
    """Of backed tokens in three pages, the last of the id space among them, out of order."""
    geometry = rank.ftensor.geometry
    blocks = [geometry.block_id(number) for number in (USABLE_BLOCKS, 6, 1, 5)]
    rank.back_rows(blocks)
    return torch.tensor([block * page_size + (number % page_size) for number, block in enumerate(blocks)])


class TestPool:
    def test_shapes_and_addresses(self, kv_pool, rank, page_size):
        rows = rank.ftensor.id_space * page_size
        buffers = [*kv_pool.k_buffer, *kv_pool.v_buffer]
        assert len(kv_pool.k_buffer) == len(kv_pool.v_buffer) == LAYERS
        for buffer in buffers:
            assert buffer.shape == (rows, *native_pool(page_size).k_buffer[0].shape[1:])
            assert buffer.dtype == torch.float32
            assert buffer.is_contiguous()
        pointers = [buffer.data_ptr() for buffer in buffers]
        assert len(set(pointers)) == 2 * LAYERS
        assert kv_pool.data_ptrs.tolist() == pointers
        assert kv_pool.k_data_ptrs.tolist() == pointers[:LAYERS]
        assert kv_pool.v_data_ptrs.tolist() == pointers[LAYERS:]
        assert kv_pool.data_strides.tolist() == [BLOCK_BYTES // page_size] * 2 * LAYERS

    def test_size_bounds_indices_and_not_what_is_counted(self, kv_pool, rank, page_size):
        assert kv_pool.size + page_size == len(kv_pool.k_buffer[0])
        assert kv_pool.get_kv_size_bytes() == native_pool(page_size).get_kv_size_bytes()
        assert kv_pool.mem_usage == native_pool(page_size).mem_usage
        assert rank.ftensor.mapped_pages() == [0], "counting touches nothing"

    def test_page_0_can_be_written_from_the_start(self, kv_pool, rank, page_size):
        padding = torch.arange(page_size)
        for layer in range(LAYERS):
            written = random_rows(page_size, page_size)
            kv_pool.set_kv_buffer(SimpleNamespace(layer_id=layer), padding, written, -written)
            assert torch.equal(kv_pool.get_key_buffer(layer)[:page_size], written)
        assert rank.ftensor.mapped_pages() == [0]

    def test_rows_of_k_and_v_of_each_layer(self, kv_pool, rank, page_size):
        indices = some_indices(rank, page_size)
        written = {}
        for layer in range(LAYERS):
            k, v = random_rows(len(indices), page_size), random_rows(len(indices), page_size)
            kv_pool.set_kv_buffer(SimpleNamespace(layer_id=layer), indices, k.clone(), v.clone())
            written[layer] = k, v
        for layer, (k, v) in written.items():
            buffers = kv_pool.get_kv_buffer(layer)
            assert torch.equal(buffers[0][indices], k) and torch.equal(buffers[1][indices], v)
        elsewhere = kv_pool.k_buffer[0][: 2 * page_size]
        assert elsewhere[:page_size].count_nonzero() == 0

    def test_moved_rows(self, kv_pool, rank, page_size):
        """By SGLang's kernel, which goes by the addresses and strides of the pool."""
        indices = some_indices(rank, page_size)
        source, target = indices[:2], indices[2:]
        layers = [(random_rows(2, page_size), random_rows(2, page_size)) for _ in range(LAYERS)]
        for layer, (k, v) in enumerate(layers):
            kv_pool.set_kv_buffer(SimpleNamespace(layer_id=layer), source, k.clone(), v.clone())
        kv_pool.move_kv_cache(target, source)
        for layer, (k, v) in enumerate(layers):
            assert torch.equal(kv_pool.k_buffer[layer][target], k)
            assert torch.equal(kv_pool.v_buffer[layer][target], v)

    def test_an_index_past_the_end_is_noticed(self, kv_pool, page_size):
        row = random_rows(1, page_size)
        past = torch.tensor([kv_pool.size + page_size])
        with pytest.raises(RuntimeError, match="out of range"):
            kv_pool.set_kv_buffer(SimpleNamespace(layer_id=0), past, row, row)

    def test_another_layout_is_refused(self, rank, page_size):
        with pytest.raises(UnsupportedConfiguration, match="KV cache layout vectorized_5d"):
            ElasticMHATokenToKVPool(
                USABLE_BLOCKS * page_size,
                **arguments(page_size),
                kv_cache_layout="vectorized_5d",
                rank=rank,
            )


class TestConfigurator:
    """SGLang's configurator, as much of it as the seams look at, with the seams around its methods."""

    @pytest.fixture(autouse=True)
    def one_rank(self, monkeypatch):
        monkeypatch.setattr(
            "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_tp_size=1)
        )

    @pytest.fixture
    def configurator(self, page_size):
        shape = arguments(page_size)
        made = Configurator(
            page_size,
            model_config=SimpleNamespace(
                is_encoder_decoder=False,
                head_dim=shape["head_dim"],
                v_head_dim=shape["head_dim"],
                get_num_kv_heads=lambda tp_size: HEADS // tp_size,
            ),
            server_args=SimpleNamespace(get_attention_backends=lambda: ("triton", "triton")),
        )
        memory = local_memory(
            SimpleNamespace(
                page_bytes=None,
                layout="chunked",
                unbacked="hole",
                handle_cache_bytes=0,
                pool_options={"min_reserved_bytes": 0, "max_reserved_bytes": 0, "highest_pages_first": False},
            ),
            "sglang",
        )
        attach(memory, made.server_args)
        yield made
        memory.close()

    def test_what_it_agrees_on(self, configurator, page_size):
        agreement = agree(configurator, USABLE_BLOCKS * page_size + page_size - 1)
        assert agreement.buffers == BUFFERS
        assert agreement.block_bytes == BLOCK_BYTES
        assert agreement.tokens_per_block == page_size
        assert agreement.num_blocks == USABLE_BLOCKS + 1

    def test_elastic(self, configurator, page_size):
        result = configurator.configure(pre_model_load_memory=1)
        kv_pool, allocator = result.token_to_kv_pool, result.token_to_kv_pool_allocator
        assert isinstance(kv_pool, MHATokenToKVPool) and kv_pool.is_elastic
        assert allocator.is_elastic and allocator.get_kvcache() is kv_pool
        assert allocator.size == USABLE_BLOCKS * page_size
        memory = EngineMemory.of(configurator.server_args)
        row = allocator.alloc(USABLE_BLOCKS * page_size)
        assert memory.pool.held_size() == USABLE_BLOCKS + 1
        kv_pool.k_buffer[-1][row] = 1.0  # backed, all of it

    def test_native_without_us(self, configurator):
        EngineMemory.detach(configurator.server_args)
        configurator.is_hybrid_swa = True  # nobody looks
        result = configurator.configure(pre_model_load_memory=1)
        assert type(result.token_to_kv_pool) is MHATokenToKVPool
        assert not hasattr(result.token_to_kv_pool_allocator, "is_elastic")
        assert configurator.built == 1

    @pytest.mark.parametrize("known", ["before", "while", "after"])
    def test_refused_it_is_built_again_natively(self, configurator, monkeypatch, caplog, known):
        self.refuse(configurator, known)
        caplog.set_level(logging.WARNING, logger="kvcached")
        result = configurator.configure(pre_model_load_memory=1)
        assert type(result.token_to_kv_pool) is MHATokenToKVPool
        assert not hasattr(result.token_to_kv_pool_allocator, "is_elastic")
        assert EngineMemory.of(configurator.server_args) is None
        assert configurator.built == (1 if known == "before" else 2)
        (warning,) = [record.getMessage() for record in caplog.records if record.name == "kvcached"]
        assert "runs natively" in warning

    def test_what_was_refused_is_gone_before_it_is_built_again(self, configurator, monkeypatch):
        """A native part of it may be as large as the whole cache."""
        monkeypatch.setattr(
            logging.getLogger("kvcached"), "disabled", True
        )  # pytest keeps records, and they the error
        gc.collect()
        before = _core.live_ranges()  # of tests whose frames pytest keeps
        self.refuse(configurator, "after")
        configurator.configure(pre_model_load_memory=1)
        assert configurator.alive_when_built_again == [False]
        assert _core.live_ranges() == before

    @pytest.mark.parametrize("known", ["before", "while", "after"])
    def test_refused_and_strict_it_is_not_built(self, configurator, monkeypatch, known):
        monkeypatch.setenv("KVCACHED_STRICT", "1")
        self.refuse(configurator, known)
        with pytest.raises(UnsupportedConfiguration):
            configurator.configure(pre_model_load_memory=1)
        assert configurator.built == (0 if known == "before" else 1)

    def test_terms_that_cannot_be_kept_end_the_start(self, configurator, monkeypatch):
        instance.discard_record()
        monkeypatch.setenv("KVCACHED_STRICT", "0")
        monkeypatch.setenv("KVCACHED_LIMIT", "1K")
        with pytest.raises(TermsError, match="below what an engine needs to start"):
            configurator.configure(pre_model_load_memory=1)
        assert configurator.built == 1 and not instance.has_record()

    @staticmethod
    def refuse(configurator, known: str) -> None:
        if known == "before":
            configurator.use_mla_backend = True
        elif known == "while":
            configurator.pool_class = type("AnotherPool", (MHATokenToKVPool,), {})
        else:
            configurator.native_part = True


class Configurator(SimpleNamespace):
    """Builds as SGLang's does, by methods that the seams replace."""

    device, gpu_id = "cpu", 0
    is_draft_worker = use_mla_backend = is_hybrid_swa = native_part = False
    mambaish_config = None
    kv_cache_dtype = model_dtype = torch.float32
    layer_info = SimpleNamespace(num_effective_layers=LAYERS)
    pool_class = MHATokenToKVPool

    def __init__(self, page_size: int, **others) -> None:
        super().__init__(pool_page_size=page_size, built=0, alive_when_built_again=[], **others)

    @build.checked
    def configure(self, *, pre_model_load_memory):
        self.built += 1
        if hasattr(self, "first"):
            self.alive_when_built_again.append(self.first() is not None)
        tokens, page_size = USABLE_BLOCKS * self.pool_page_size, self.pool_page_size
        with_us = EngineMemory.of(self.server_args) is not None
        kv_pool = self._build_mha_kv_pool(
            max_total_num_tokens=tokens, mha_pool_class=self.pool_class if with_us else MHATokenToKVPool
        )
        allocator = self._build_token_to_kv_pool_allocator(kv_pool=kv_pool, page_size=page_size)
        if self.native_part and with_us:
            allocator.part = native_allocator(page_size)
            self.first = weakref.ref(allocator.part)
        return SimpleNamespace(token_to_kv_pool=kv_pool, token_to_kv_pool_allocator=allocator)

    @build.elastic_pool
    def _build_mha_kv_pool(self, *, max_total_num_tokens, mha_pool_class, quant_method):
        assert quant_method is None
        return mha_pool_class(max_total_num_tokens, **arguments(self.pool_page_size))

    @build.elastic_allocator
    def _build_token_to_kv_pool_allocator(self, *, kv_pool, page_size):
        return native_allocator(page_size, kv_pool=kv_pool)


class TestWhatWasBuilt:
    """Every pool and every allocator that can be reached is looked at."""

    @pytest.fixture
    def parts(self, elastic, kv_pool, page_size):
        return kv_pool, elastic(page_size, kv_pool=kv_pool)

    def test_elastic_parts_pass(self, parts):
        build.check_built(*parts)

    def test_a_native_pool_or_allocator(self, parts, page_size):
        kv_pool, allocator = parts
        with pytest.raises(UnsupportedConfiguration, match=r"^MHATokenToKVPool is not supported"):
            build.check_built(native_pool(page_size), allocator)
        with pytest.raises(UnsupportedConfiguration, match=type(native_allocator(page_size)).__name__):
            build.check_built(kv_pool, native_allocator(page_size, kv_pool=kv_pool))

    def test_a_native_pool_inside_another(self, parts, page_size):
        kv_pool, allocator = parts
        hybrid = HybridLinearKVPool.__new__(HybridLinearKVPool)
        hybrid.is_elastic = True  # as if somebody had thought of the outer one only
        hybrid.full_kv_pool = native_pool(page_size)
        kv_pool.draft = hybrid
        with pytest.raises(UnsupportedConfiguration, match=r"^MHATokenToKVPool is not supported"):
            build.check_built(kv_pool, allocator)

    def test_a_native_allocator_inside_another(self, parts, page_size):
        kv_pool, allocator = parts
        allocator.swa_attn_allocator = native_allocator(page_size)
        with pytest.raises(UnsupportedConfiguration, match=type(native_allocator(page_size)).__name__):
            build.check_built(kv_pool, allocator)

    def test_an_allocator_of_another_pool(self, parts, elastic, page_size):
        kv_pool, allocator = parts
        with pytest.raises(UnsupportedConfiguration, match="over a pool that is not its engine's"):
            build.check_built(kv_pool, elastic(page_size, kv_pool=allocator.get_kvcache().__class__))


class TestCapacity:
    """SGLang's own profile on a GPU of 140 GiB that a neighbour uses too."""

    @pytest.fixture(params=[False, True], ids=["without NVML", "NVML"])
    def budget(self, request, monkeypatch):
        def measure(neighbour_at_start: int, neighbour_later: int, elastic: bool = True) -> int:
            device = Device(neighbour=neighbour_at_start, nvml=request.param)

            def free_gib(*args, **kwargs) -> float:
                return (device.total - device.neighbour - device.context - device.reserved) / GIB

            monkeypatch.setattr(kv_cache_configurator, "get_available_gpu_memory", free_gib)
            server_args = SimpleNamespace()
            memory = local_memory(SimpleNamespace(), "sglang")
            if elastic:
                attach(memory, server_args)
                rank_of(memory).own_use = device.own_use()
            before = free_gib()
            device.neighbour = neighbour_later
            device.reserved += 20 * GIB  # the weights
            configurator = SimpleNamespace(
                server_args=server_args,
                device="cuda",
                gpu_id=0,
                mambaish_config=None,
                post_capture_kv_active=False,
            )
            profile = capacity.measured_alone(KVCacheConfigurator._profile_available_bytes)
            found = profile(configurator, before)
            assert kv_cache_configurator.get_available_gpu_memory is free_gib
            return found

        monkeypatch.setattr(
            kv_cache_configurator, "get_world_group", lambda: SimpleNamespace(world_size=1, cpu_group=None)
        )
        monkeypatch.setattr(
            kv_cache_configurator, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=0.8)
        )
        return measure

    @pytest.mark.parametrize(("at_start", "later"), [(0, 40), (60, 0), (60, 60)])
    def test_neighbours_do_not_change_it(self, budget, at_start, later):
        alone = budget(0, 0)
        assert alone == pytest.approx(0.8 * (140 - 0.5) * GIB - 20 * GIB, abs=2 * GIB)
        assert budget(at_start * GIB, later * GIB) == pytest.approx(alone, abs=2 * GIB)
        assert abs(budget(at_start * GIB, later * GIB, elastic=False) - alone) > 8 * GIB, "natively they do"


def test_closed_memory_is_not_used(memory, page_size):
    memory.close()
    with pytest.raises(StateConsistencyError):
        ElasticMHATokenToKVPool(USABLE_BLOCKS * page_size, **arguments(page_size), rank=rank_of(memory))

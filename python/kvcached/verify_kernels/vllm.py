"""vLLM's attention backends, each through vLLM's own interface: the layer chooses the backend, and its metadata builder, its store and its
attention are those of a model's step. Knows no backend but by name.

Versions: the KV cache is viewed by `create_kv_cache_views` where vLLM has it (0.29), else by the backend's own shape and strides (0.26).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcached.integration.vllm.backends import FLASH_ATTENTION, record_name
from kvcached.verify_kernels.cases import MODEL_TOKENS, Shape
from kvcached.verify_kernels.subject import UntestedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.verify_kernels.subject import Inputs

__all__ = ["Vllm"]

LAYER = "model.layers.0.self_attn.attn"
MAX_REQUESTS = 64
MAX_COMPILED = 1024

#: Grouped, one KV head, as many KV heads as heads; small and large blocks and heads. Quick: the first two.
GPU_SHAPES = (
    Shape(16, 32, 8, 128, "bfloat16"),
    Shape(64, 16, 1, 128, "bfloat16"),
    Shape(32, 8, 8, 64, "bfloat16"),
    Shape(128, 28, 4, 128, "float16"),
    Shape(16, 16, 8, 256, "bfloat16"),
)
CPU_SHAPES = (
    Shape(32, 8, 2, 64, "float32"),
    Shape(64, 4, 1, 128, "bfloat16"),
    Shape(128, 4, 4, 64, "float32"),
    Shape(32, 7, 1, 80, "bfloat16"),
)


class Vllm:
    """One backend, for example "TRITON_ATTN", "FLASH_ATTN" (the version that vLLM prefers here) or "FLASH_ATTN/2"."""

    engine = "vllm"
    buffers_per_layer = 1

    def __init__(self, backend: str, device: str) -> None:
        import vllm

        self.version: str = vllm.__version__
        self.notes: list[str] = []
        self._device = torch.device(device)
        self._name, _, version = backend.partition("/")
        if version and not (self._name == FLASH_ATTENTION and version.isdigit()):
            raise UntestedError(f"{backend}: only {FLASH_ATTENTION} has versions")
        self._flash_attention = int(version) if version else None
        self._check_platform()
        self._check_name()
        self._have_matrix_tiles()
        self._models: dict[Shape, _Model] = {}
        self._refusals: list[str] = []
        for shape in GPU_SHAPES if self._device.type == "cuda" else CPU_SHAPES:
            self._try(shape)
        names = {record_name(model.layer) for model in self._models.values()}
        if not names:
            raise UntestedError(f"{backend} takes none of the shapes: {self._refusals[0]}")
        if len(names) > 1:
            raise UntestedError(f"{backend} is several backends, by the model: {', '.join(sorted(names))}")
        (self.backend,) = names

    def _check_platform(self) -> None:
        from vllm.platforms import current_platform

        at_hand = "cuda" if current_platform.is_cuda() else current_platform.device_type
        if at_hand != self._device.type:
            raise UntestedError(f"this vLLM runs on {at_hand or 'nothing here'}, not on {self._device.type}")

    def _have_matrix_tiles(self) -> None:
        """Have a CPU's matrix tiles (AMX) granted to this process. In an engine the first matrix product asks the kernel for
        them; vLLM's attention relies on that, and without it dies of an illegal instruction.
        """
        if self._device.type == "cpu":
            tile = torch.ones(64, 64, dtype=torch.bfloat16)
            torch.matmul(tile, tile)

    def _check_name(self) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if self._name not in AttentionBackendEnum.__members__:
            raise UntestedError(f"vLLM {self.version} has no backend {self._name}")

    def _try(self, shape: Shape) -> None:
        """Keep a model of this shape, or why vLLM does not give it this backend."""
        try:
            model = _Model(shape, self._name, self._flash_attention, self._device)
        except _NotTakenError as error:
            self._refusals.append(f"{shape}: {error}")
        else:
            self._models[shape] = model

    def shapes(self, *, quick: bool) -> list[Shape]:
        """See `Subject.shapes`."""
        taken = list(self._models)
        return taken[:2] if quick else taken

    def block_bytes(self, shape: Shape) -> int:
        """See `Subject.block_bytes`; K and V lie in one buffer."""
        return int(self._models[shape].spec.page_size_bytes)

    def open(self, shape: Shape, layers: Sequence[Sequence[Any]], num_rows: int) -> _Opened:
        """See `Subject.open`."""
        return _Opened(self._models[shape], [buffer for (buffer,) in layers], num_rows)


class _NotTakenError(Exception):
    """vLLM does not run this backend on a model of this shape."""


class _Model:
    """The attention layer of a model of this shape, and all that vLLM derives from its configuration."""

    def __init__(self, shape: Shape, backend: str, flash_attention: int | None, device: torch.device) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention

        self.shape, self.device = shape, device
        dtype = getattr(torch, shape.dtype)
        try:
            self.config = _config(shape, backend, flash_attention)
            with set_current_vllm_config(self.config), _defaults(dtype, device):
                self.layer = Attention(
                    shape.num_heads,
                    shape.head_size,
                    shape.head_size**-0.5,
                    num_kv_heads=shape.num_kv_heads,
                    cache_config=self.config.cache_config,
                    prefix=LAYER,
                )
                self.layer.process_weights_after_loading(dtype)
                self.backend = self.layer.get_attn_backend()
                self.spec = self.layer.get_kv_cache_spec(self.config)
                if hasattr(self.backend, "customize_spec"):
                    self.spec = self.backend.customize_spec(self.spec)
                takes_block = self._takes_block()
        except (ValueError, NotImplementedError) as error:
            raise _NotTakenError(" ".join(str(error).split())) from error
        if self.backend.get_name() != backend:
            raise _NotTakenError(f"vLLM chooses {self.backend.get_name()} here")
        if backend == FLASH_ATTENTION and self.layer.impl.vllm_flash_attn_version is None:
            raise _NotTakenError("no FlashAttention of this version is installed")
        if flash_attention not in (None, getattr(self.layer.impl, "vllm_flash_attn_version", None)):
            raise _NotTakenError(f"vLLM chooses {record_name(self.layer)} here")
        if not takes_block:
            raise _NotTakenError(f"blocks of {shape.block_tokens} tokens are split for its kernels")

    def _takes_block(self) -> bool:
        """Whether its kernels take a block whole."""
        sizes = self.backend.get_supported_kernel_block_sizes()
        block = self.shape.block_tokens
        return any(block % size.base == 0 if hasattr(size, "base") else block == size for size in sizes)

    def builder(self) -> Any:
        """A metadata builder, made as vLLM's model runners make theirs."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.worker.utils import AttentionGroup

        group = AttentionGroup(self.backend, [LAYER], self.spec, 0)
        with set_current_vllm_config(self.config):
            group.create_metadata_builders(self.config, self.device, self.shape.block_tokens)
        return group.get_metadata_builder()

    def view(self, buffer: Any, num_rows: int) -> Any:
        """The KV cache as the backend sees it, [blocks, ...], over flat bytes."""
        from vllm.v1 import kv_cache_interface

        if hasattr(kv_cache_interface, "create_kv_cache_views"):
            return self._view_by_layout(buffer, num_rows)
        shape = self.backend.get_kv_cache_shape(
            num_rows, self.shape.block_tokens, self.shape.num_kv_heads, self.shape.head_size
        )
        order = tuple(range(len(shape)))
        with contextlib.suppress(AttributeError, NotImplementedError):  # as they lie, then
            order = self.backend.get_kv_cache_stride_order()
        if shape[0] != num_rows or order[0] != 0:
            raise UntestedError("its blocks are not the first dimension of its KV cache")
        physical = buffer.view(self.spec.dtype).view([shape[axis] for axis in order])
        return physical.permute(*(order.index(axis) for axis in range(len(order))))

    def _view_by_layout(self, buffer: Any, num_rows: int) -> Any:
        """0.29: as `kvcached.integration.vllm.allocation.kv_cache_views` has vLLM view a layer."""
        from vllm.v1.attention.backends.utils import (
            get_supported_kv_cache_layouts,
            resolve_kv_cache_layout,
        )
        from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views

        supported = [layout.name for layout in get_supported_kv_cache_layouts([self.backend])]
        layout = resolve_kv_cache_layout(self.config, [supported], [self.spec])
        if not layout.is_block_compact:
            raise UntestedError(f"in its KV cache layout {layout.name} a block is not one run of bytes")
        placed = KVCacheTensor(
            size=buffer.numel(),
            layers=[LAYER],
            layer_stride=buffer.numel(),
            block_stride=self.spec.page_size_bytes,
            offset=0,
        )
        (view,) = create_kv_cache_views(
            buffer, self.spec, num_rows, layout, placed, kernel_block_size=self.shape.block_tokens
        )
        return view


class _Opened:
    def __init__(self, model: _Model, buffers: list[Any], num_rows: int) -> None:
        from vllm.config import set_current_vllm_config

        self._model, self._num_rows = model, num_rows
        with set_current_vllm_config(model.config):
            self._caches = [model.view(buffer, num_rows) for buffer in buffers]
        self._tell_num_rows()
        self._builder = model.builder()

    def _tell_num_rows(self) -> None:
        """The sparse tensors and the dense ones differ in it; some builders take it from the configuration."""
        self._model.config.cache_config.num_gpu_blocks = self._num_rows

    def run(self, layer: int, inputs: Inputs) -> Any:
        """See `Opened.run`: one call of the attention layer, which stores and attends."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        model = self._model
        self._tell_num_rows()
        with torch.inference_mode(), set_current_vllm_config(model.config):
            metadata = self._builder.build(0, self._metadata(inputs))
            model.layer.kv_cache = self._caches[layer]
            tokens = inputs.query.shape[0]
            with set_forward_context(
                {LAYER: metadata}, model.config, num_tokens=tokens, slot_mapping={LAYER: inputs.slots}
            ):
                # Clones: a backend may overwrite what it is given.
                return model.layer(
                    *(tensor.clone().flatten(1) for tensor in (inputs.query, inputs.key, inputs.value))
                )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """See `Opened.copy_blocks`."""
        try:
            from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace
        except ImportError:
            return False
        copy_kv_cache_blocks_inplace(self._caches, self._num_rows, list(pairs))
        return True

    def wrong_with_ids(self, ids: Sequence[int]) -> list[str]:
        """See `Opened.wrong_with_ids`: there are none."""
        return []

    def _metadata(self, inputs: Inputs) -> Any:
        """What vLLM's model runner tells a builder, of the members that this version has."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts, seq_lens = inputs.query_start.cpu(), inputs.seq_lens.cpu()
        told = {
            "query_start_loc": inputs.query_start,
            "query_start_loc_cpu": starts,
            "seq_lens": inputs.seq_lens,
            "num_reqs": len(seq_lens),
            "num_actual_tokens": inputs.query.shape[0],
            "max_query_len": inputs.max_query_tokens,
            "max_seq_len": inputs.batch.max_seq_tokens,
            "block_table_tensor": inputs.block_table,
            "slot_mapping": inputs.slots,
            "causal": True,
            "seq_lens_cpu_upper_bound": seq_lens,
            "_seq_lens_cpu": seq_lens,
            "_num_computed_tokens_cpu": seq_lens - (starts[1:] - starts[:-1]),
        }
        known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
        return CommonAttentionMetadata(**{name: value for name, value in told.items() if name in known})


def _config(shape: Shape, backend: str, flash_attention: int | None) -> Any:
    """The configuration of an engine that would serve a model of this shape with this backend."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory(prefix="kvcached-model-") as folder:
        model = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.num_heads * shape.head_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_size,
            "intermediate_size": 256,
            "vocab_size": 256,
            "max_position_embeddings": MODEL_TOKENS,
            "hidden_act": "silu",
        }
        (Path(folder) / "config.json").write_text(json.dumps(model))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=shape.dtype,
            block_size=shape.block_tokens,
            max_model_len=MODEL_TOKENS,
            max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=MODEL_TOKENS,
            enforce_eager=current_platform.is_cpu(),
            attention_backend=None if current_platform.is_cpu() else backend,
        ).create_engine_config()
    # One process has the shapes of many engines, and a backend may compile itself for each.
    torch._dynamo.config.recompile_limit = MAX_COMPILED
    torch._dynamo.config.accumulated_recompile_limit = MAX_COMPILED
    if flash_attention is not None:
        config.attention_config.flash_attn_version = flash_attention
    if config.cache_config.block_size != shape.block_tokens:
        raise _NotTakenError(f"vLLM chooses blocks of {config.cache_config.block_size} tokens")
    return config


@contextlib.contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """As while a model is loaded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)

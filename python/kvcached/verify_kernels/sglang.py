"""SGLang's attention backends, each as SGLang makes it: from its registry, over SGLang's own KV pool, request table and forward batches. Knows no
backend but by name.

The model is a configuration without weights, and the runner that a backend is given has what backends read of SGLang's own.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kvcached.verify_kernels.cases import MODEL_TOKENS, Shape
from kvcached.verify_kernels.subject import UntestedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.verify_kernels.subject import Inputs

__all__ = ["Sglang"]

MAX_REQUESTS = 64

#: Page sizes of one token and of several; grouped, one KV head, as many KV heads as heads. Quick: the first two. Rows of few
#: widths, as the store kernel is compiled for each.
GPU_SHAPES = (
    Shape(1, 32, 8, 128, "bfloat16"),
    Shape(16, 32, 8, 128, "bfloat16"),
    Shape(64, 16, 16, 64, "bfloat16"),
    Shape(1, 16, 1, 128, "bfloat16"),
)
CPU_SHAPES = (
    Shape(1, 8, 2, 64, "float32"),
    Shape(16, 4, 4, 32, "float32"),
    Shape(64, 7, 1, 64, "float32"),
)


class Sglang:
    """One backend by the name of `--attention-backend`, for example "triton"."""

    engine = "sglang"
    buffers_per_layer = 2

    def __init__(self, backend: str, device: str) -> None:
        import sglang
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        self.version: str = sglang.__version__
        self.notes: list[str] = []
        self.backend, self._device = backend, device
        if backend not in ATTENTION_BACKENDS:
            raise UntestedError(f"SGLang {self.version} has no backend {backend}")
        if device == "cpu" and backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UntestedError("on a CPU its kernels need TRITON_INTERPRET=1, which proves nothing of a GPU")

    def shapes(self, *, quick: bool) -> list[Shape]:
        """See `Subject.shapes`."""
        shapes = list(CPU_SHAPES if self._device == "cpu" else GPU_SHAPES)
        return shapes[:2] if quick else shapes

    def block_bytes(self, shape: Shape) -> int:
        """See `Subject.block_bytes`; a block is one of SGLang's pages."""
        itemsize = getattr(torch, shape.dtype).itemsize
        return int(shape.block_tokens * shape.num_kv_heads * shape.head_size * itemsize)

    def open(self, shape: Shape, layers: Sequence[Sequence[Any]], num_rows: int) -> _Opened:
        """See `Subject.open`."""
        opened = _Opened(self.backend, shape, layers, num_rows, self._device)
        row_bytes = self.block_bytes(shape) // shape.block_tokens
        if self._device != "cpu" and not _has_store_kernel(row_bytes):
            self.notes.append(f"SGLang's store kernel cannot be compiled here for rows of {row_bytes} bytes")
        return opened


class _Opened:
    def __init__(
        self, backend: str, shape: Shape, layers: Sequence[Sequence[Any]], num_rows: int, device: str
    ) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.runtime_context import get_parallel

        self._shape, self._device, self._num_rows = shape, device, num_rows
        server_args, model_config = _configured(shape, backend, device)
        self._pool = _pool(shape, layers, num_rows, device)
        self._requests = ReqToTokenPool(MAX_REQUESTS, MODEL_TOKENS, device, False)
        self._layers = [
            RadixAttention(
                shape.num_heads, shape.head_size, shape.head_size**-0.5, shape.num_kv_heads, layer_id=layer
            )
            for layer in range(len(layers))
        ]
        runner = _runner(shape, server_args, model_config, self._requests, self._pool, device)
        # One process without any others, which SGLang would otherwise set up.
        with get_parallel().override(attn_tp_size=1, attn_tp_rank=0, attn_dcp_size=1, attn_dcp_rank=0):
            self._backend = ATTENTION_BACKENDS[backend](runner)
        self._has_graphs = self._started_graphs()

    def _started_graphs(self) -> bool:
        """Whether the backend can run as in a CUDA graph."""
        try:
            self._backend.init_cuda_graph_state(MAX_REQUESTS, MAX_REQUESTS)
        except NotImplementedError:
            return False
        return True

    def run(self, layer: int, inputs: Inputs) -> Any:
        """See `Opened.run`. Decodes are padded and prepared as for a CUDA graph where the batch says so."""
        self._write_table(inputs)
        with torch.no_grad():
            batch = self._forward_batch(inputs)
            if inputs.batch.padding and self._has_graphs:
                self._backend.init_forward_metadata_out_graph(batch, in_capture=True)
            else:
                self._backend.init_forward_metadata(batch)
            # Clones: a backend may overwrite what it is given.
            query, key, value = inputs.query.clone(), inputs.key.clone(), inputs.value.clone()
            return self._backend.forward(query.flatten(1), key, value, self._layers[layer], batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """See `Opened.copy_blocks`."""
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self._device).T
        self._pool.move_kv_cache(self._tokens_of(targets), self._tokens_of(sources))
        return True

    def wrong_with_ids(self, ids: Sequence[int]) -> list[str]:
        """See `Opened.wrong_with_ids`: the kernels that give out tokens of pages."""
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        page = self._shape.block_tokens
        if page == 1:
            return []
        allocator = PagedTokenToKVPoolAllocator(
            self._pool.size, page, self._pool.dtype, self._device, self._pool, need_sort=False
        )
        # Three requests: one new, one whose last page has room, one whose has none.
        held, free = [ids[-1], ids[-2]], list(ids[-9:-2])
        prefixes, lengths = [0, page // 2, page], [2 * page + 1, 2 * page, 2 * page]
        last = [-1, held[0] * page + page // 2 - 1, held[1] * page + page - 1]
        allocator.free_pages = self._tensor(free)
        given = allocator.alloc_extend(
            self._tensor(prefixes),
            torch.tensor(prefixes),
            self._tensor(lengths),
            torch.tensor(lengths),
            self._tensor(last),
            sum(lengths) - sum(prefixes),
        )
        room = [held[0] * page + offset for offset in range(page // 2, page)]
        extended = [*_tokens(free[:3], page)[: 2 * page + 1], *room, *_tokens(free[3:5], page)]
        wrong = [] if given.tolist() == extended else ["alloc_extend"]
        # A token more for each: the first has room, the others need a page.
        last = [extended[2 * page], extended[2 * page + len(room) + page], extended[-1]]
        lengths = [length + 1 for length in lengths]
        given = allocator.alloc_decode(self._tensor(lengths), torch.tensor(lengths), self._tensor(last))
        next_ones = [last[0] + 1, free[5] * page, free[6] * page]
        return wrong + ([] if given.tolist() == next_ones else ["alloc_decode"])

    def _tensor(self, values: Sequence[int]) -> Any:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _tokens_of(self, pages: Any) -> Any:
        """The tokens of these pages."""
        page = self._shape.block_tokens
        return (pages[:, None] * page + torch.arange(page, device=pages.device)).flatten()

    def _write_table(self, inputs: Inputs) -> None:
        """Tokens of each request in a row of its own, stale ones too; row 0 is of padding, and stays as SGLang made it."""
        page, table = self._shape.block_tokens, inputs.block_table
        tokens = table.to(torch.int64)[:, :, None] * page + torch.arange(page, device=table.device)
        rows = len(inputs.batch.requests)
        self._requests.req_to_token[1 : rows + 1] = tokens.flatten(1)[:rows, :MODEL_TOKENS].to(torch.int32)

    def _forward_batch(self, inputs: Inputs) -> Any:
        """What SGLang's scheduler and its runner make of such a batch."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        batch = inputs.batch
        padding, rows = batch.padding, len(batch.requests)
        decode = all(request.query_tokens == 1 for request in batch.requests)
        fill = self._backend.get_cuda_graph_seq_len_fill_value() if self._has_graphs else 1
        seq_lens = [request.seq_tokens for request in batch.requests] + [fill] * padding
        exact = batch.max_seq_tokens == max(request.seq_tokens for request in batch.requests)
        made = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=rows + padding,
            input_ids=torch.zeros(inputs.query.shape[0], dtype=torch.int64, device=self._device),
            req_pool_indices=self._tensor([*range(1, rows + 1), *[0] * padding]),
            seq_lens=self._tensor(seq_lens),
            out_cache_loc=inputs.slots.clamp(min=0),
            # Where the scheduler does not wait for the GPU, these are not known on the host.
            seq_lens_sum=sum(seq_lens) if exact else None,
            seq_lens_cpu=torch.tensor(seq_lens),
        )
        if not decode:
            queries = [request.query_tokens for request in batch.requests]
            contexts = [request.context_tokens for request in batch.requests]
            made.extend_num_tokens = sum(queries)
            made.extend_seq_lens = self._tensor(queries).to(torch.int32)
            made.extend_prefix_lens = self._tensor(contexts).to(torch.int32)
            made.extend_start_loc = inputs.query_start[:-1]
            made.extend_prefix_lens_cpu = contexts if exact else None
            made.extend_seq_lens_cpu = queries if exact else None
        return made


def _has_store_kernel(row_bytes: int) -> bool:
    """Whether SGLang stores with the kernel that it compiles, and not with torch's."""
    from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache

    return bool(can_use_store_cache(row_bytes, row_bytes))


def _tokens(pages: Sequence[int], page: int) -> list[int]:
    return [block * page + offset for block in pages for offset in range(page)]


def _configured(shape: Shape, backend: str, device: str) -> tuple[Any, Any]:
    """Server arguments and model configuration of a server with a model of this shape, published as SGLang publishes them."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.num_heads * shape.head_size,
        "num_hidden_layers": 2,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": 256,
        "vocab_size": 256,
        "max_position_embeddings": MODEL_TOKENS,
        "hidden_act": "silu",
    }
    with tempfile.TemporaryDirectory(prefix="kvcached-model-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        server_args = ServerArgs(
            model_path=folder,
            device=device.partition(":")[0],
            dtype=shape.dtype,
            attention_backend=backend,
            page_size=shape.block_tokens,
            context_length=MODEL_TOKENS,
            skip_tokenizer_init=True,
            load_format="dummy",
            sampling_backend="pytorch",
            grammar_backend="none",
            mem_fraction_static=0.2,
        )
        if server_args.page_size != shape.block_tokens:
            raise UntestedError(f"SGLang chooses pages of {server_args.page_size} tokens for {backend}")
        get_context().set_server_args(server_args)
        return server_args, ModelConfig.from_server_args(server_args)


def _runner(shape: Shape, server_args: Any, model_config: Any, requests: Any, pool: Any, device: str) -> Any:
    """What backends read of a `ModelRunner`."""
    dtype = getattr(torch, shape.dtype)
    return SimpleNamespace(
        server_args=server_args,
        model_config=model_config,
        req_to_token_pool=requests,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=shape.block_tokens, size=pool.size),
        device=device.partition(":")[0],
        gpu_id=0,
        page_size=shape.block_tokens,
        dtype=dtype,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str="auto",
        sliding_window_size=None,
        attention_chunk_size=None,
        is_draft_worker=False,
        is_hybrid_swa=False,
        use_mla_backend=False,
        init_new_workspace=False,
        max_total_num_tokens=pool.size,
        tp_size=1,
    )


def _pool(shape: Shape, layers: Sequence[Sequence[Any]], num_rows: int, device: str) -> Any:
    """SGLang's pool of K and V over given bytes, as `ElasticMHATokenToKVPool` is."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    page = shape.block_tokens

    class Pool(MHATokenToKVPool):  # type: ignore[misc]
        def _create_buffers_normal(self) -> None:
            if self.use_hnd or self.kv_cache_layout != "nhd":
                raise UntestedError(f"KV cache layout {self.kv_cache_layout}")
            rows = (num_rows * page, self.head_num, self.head_dim)
            views = [[buffer.view(self.store_dtype).view(rows) for buffer in buffers] for buffers in layers]
            self.k_buffer, self.v_buffer = ([pair[i] for pair in views] for i in range(2))

    return Pool(
        (num_rows - 1) * page,
        page_size=page,
        dtype=getattr(torch, shape.dtype),
        head_num=shape.num_kv_heads,
        head_dim=shape.head_size,
        layer_num=len(layers),
        device=device.partition(":")[0],
        enable_memory_saver=False,
        enable_kv_cache_copy=True,
    )

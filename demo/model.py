"""A Llama with random weights, written to a folder that engines load without a network.

The engines' own dummy weights prove nothing about a KV cache: they are so small that the output hardly
depends on what the cache holds. These are wide enough that every token depends on its whole prefix.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple


class Shape(NamedTuple):
    """The sizes of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


# tiny: little to compute, but 32 KiB of KV cache a token, as much as 1b has. 1b-mha: 128 KiB a token, as 8b has.
SHAPES = {
    "tiny": Shape(hidden=256, layers=4, heads=8, kv_heads=8, head_dim=128, ffn=512, vocab=1024),
    "1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=32000),
    "1b-mha": Shape(hidden=2048, layers=16, heads=32, kv_heads=32, head_dim=64, ffn=8192, vocab=32000),
    "8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000),
}


def kv_bytes_per_token(size: str, dtype: str) -> int:
    """Bytes of one token's K and V in all layers; `size` is a key of `SHAPES`."""
    shape = SHAPES[size]
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * {"float32": 4, "bfloat16": 2}[dtype]


def write(
    folder: str | Path,
    size: str,
    dtype: str = "float32",
    max_model_len: int = 32768,
    *,
    weights: bool = True,
) -> Path:
    """Write the model unless the folder has it already; returns the folder.

    Args:
        folder: where config.json and model.safetensors go. size: a key of `SHAPES`.
        dtype: of the weights, "float32" or "bfloat16". max_model_len: tokens.
        weights: False writes the shape alone, for an engine that makes up its own (`load_format="dummy"`):
            right for speed and memory, useless for tokens.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: a folder that exists is whole.
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    shape = SHAPES[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (made / "config.json").write_text(json.dumps(config, indent=1))
    (made / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    if weights:
        _write_weights(made / "model.safetensors", shape, dtype)
    try:
        made.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(made)
    return folder


def _write_weights(path: Path, shape: Shape, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)

    def random(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale).to(kind)

    hidden, ffn = shape.hidden, shape.ffn
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = torch.ones(hidden, dtype=kind)
    tensors = {
        "model.embed_tokens.weight": random(shape.vocab, hidden, 1.0),
        "lm_head.weight": random(shape.vocab, hidden, 4 / hidden**0.5),
        "model.norm.weight": norm.clone(),
    }
    for layer in range(shape.layers):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "self_attn.q_proj": random(q_rows, hidden, 2 / hidden**0.5),
                "self_attn.k_proj": random(kv_rows, hidden, 2 / hidden**0.5),
                "self_attn.v_proj": random(kv_rows, hidden, 2 / hidden**0.5),
                "self_attn.o_proj": random(hidden, q_rows, 2 / q_rows**0.5),
                "mlp.gate_proj": random(ffn, hidden, hidden**-0.5),
                "mlp.up_proj": random(ffn, hidden, hidden**-0.5),
                "mlp.down_proj": random(hidden, ffn, ffn**-0.5),
                "input_layernorm": norm.clone(),
                "post_attention_layernorm": norm.clone(),
            }.items()
        }
    save_file(tensors, str(path), metadata={"format": "pt"})

"""Models of known shapes with random weights: speed and memory do not depend on the values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "llama3-70b": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    },
    "llama3-405b": {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 53248,
        "vocab_size": 128256,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
    },
}


def shape_config(shape: str, tokens: int, layers: int | None = None, use_cache: bool = True) -> LlamaConfig:
    """Configuration of a known shape.

    Args:
        tokens: longest sequence, `max_position_embeddings`; at least 2048.
        layers: None: all of the shape's; fewer keep each layer's shape.
    """
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    return LlamaConfig(**sizes, max_position_embeddings=max(tokens, 2048), use_cache=use_cache)


def random_model(
    shape: str,
    attention: AttentionConfig,
    *,
    tokens: int,
    dtype: str,
    device: str,
    use_cache: bool = True,
    layers: int | None = None,
) -> LolcatsForCausalLM:
    """A linearized model of a `shape_config` with random weights, made on the device in its type."""
    config = shape_config(shape, tokens, layers, use_cache)
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return convert(base.eval(), attention)


def weight_gib(shape: str, dtype: str) -> float:
    """Of the original model; a model on the meta device is enough to count."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=getattr(torch, dtype))
    return sum(parameter.nbytes for parameter in model.parameters()) / 2**30


def check_shape(shape: str) -> None:
    if shape not in SHAPES:
        raise UserError(f"no model shape named {shape!r}; there are {', '.join(SHAPES)}")

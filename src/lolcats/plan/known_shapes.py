"""Shapes of models that benchmarks and plans know by name."""

from __future__ import annotations

from typing import Any

_COLUMNS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)
_ROWS = {
    "llama3-8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "llama3-70b": (8192, 80, 64, 8, 128, 28672, 128256, False),
    "llama3-405b": (16384, 126, 128, 8, 128, 53248, 128256, False),
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True),
    "tiny": (64, 2, 4, 2, 16, 128, 256, False),
}
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_COLUMNS, row, strict=True)) for name, row in _ROWS.items()}
"""Name -> arguments of `LlamaConfig`."""

"""The pretrained model, and what takes the place of its attention."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lolcats.config.section import Section


class ModelSection(Section):
    """The pretrained model to linearize."""

    path: str | None = None
    """Hugging Face hub id or local folder."""
    revision: str | None = None
    """Branch, tag or commit of the hub repository."""
    gguf_file: str | None = None
    """Name of a GGUF file in `path`; its weights are dequantised while loading."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the frozen weights and activations; auto: bfloat16 on a GPU, float32 on a CPU.
    Feature maps, window factors and states are always float32."""
    device: str = "auto"
    """auto (first GPU, else CPU), cpu, cuda, cuda:1, ..."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (NF4, bitsandbytes): a quarter of the memory, a little less exact. The
    exported model has the checkpoint's own weights, with the trained parts."""
    trust_remote_code: bool = False
    """Run Python code shipped with the checkpoint."""


class AttentionSection(Section):
    """What replaces softmax attention (equation hybrid_linear_swa of arXiv:2410.10254)."""

    window: Literal["terraced", "sliding"] = "terraced"
    """terraced: blocks counted from the sequence start; sliding: the last `window_size` tokens."""
    window_size: int = Field(64, ge=0)
    """Tokens in the sliding window, or in one block of the terraced window; 0: no window."""
    window_blocks: int = Field(2, ge=1)
    """Terraced: softmax over the current and the previous `window_blocks - 1` blocks."""
    sinks: int = Field(0, ge=0)
    """The first `sinks` tokens stay in the softmax part of every query."""
    sparse_cache: int = Field(0, ge=0)
    """Tokens per key/value head that stay exact after they left the window (terraced windows only)."""
    cache_by: Literal["recall", "leverage"] = "recall"
    """Which ones: recall, those that the state would recall worst; leverage, those whose keys are least like the
    others."""
    decay: bool = False
    """Linear attention alone: old terms fade by a fixed factor per token and head, as in RetNet."""
    normalizer: Literal["sum", "group_norm"] = "sum"
    """sum: by the sum of weights; group_norm: linear attention alone, GroupNorm over each head's outputs (SUPRA)."""
    linear_length_cap: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """Tokens from which on the linear part weighs no more than it would at that many, for texts longer than those of
    training; 0: never; auto: `data.sequence_length`, and 0 where softmax or the linear part is alone."""
    feature_map: str | None = "hedgehog"
    """hedgehog, hedgehog_bias, t2r, elu, exp, or null: no linear term (window attention alone)."""
    feature_dim: int | None = Field(None, ge=1)
    """Columns of the feature map's weight; null: so that there are head_dim features."""
    feature_init: Literal["identity", "fitted", "zeros", "kaiming"] = "identity"
    """Initial feature-map weights: truncated identity; fitted: the same, multiplied per state head by the factor
    with the smallest error on a few sequences of the training data; zeros; or Kaiming uniform."""
    feature_scale: float = Field(1.0, gt=0)
    """Factor of the identity: an inverse temperature of maps that normalise over their features."""
    share_state: Literal["kv_head", "query_head"] = "kv_head"
    """One key feature map and state per KV head, or per query head (the paper's models)."""
    window_gamma: float = Field(0.1, gt=0.0, lt=1.0)
    """Initial gamma of every head, the factor of the window's terms."""
    keep_softmax: list[int] = []
    """Layers (from 0) that keep softmax attention and a growing KV cache."""
    sliding_layers: Literal["auto", "keep", "linearize"] = "auto"
    """Layers with a native sliding window, which already need constant memory. keep: leave them;
    linearize: replace them like the others; auto: keep them in models that mix both kinds."""

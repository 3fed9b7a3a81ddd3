"""What one forward pass wants of the linearized layers, and what they need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lolcats.ops.packing import Packing

# Keyword under which it travels from the caller through transformers' modules to the attention function.
ATTENTION_CALL = "attention_call"


@dataclass(frozen=True)
class Rows:
    """Which tokens a pass adds to which rows of a cache: generate() uses all rows, the engine some of its slots.

    Attributes:
        past: tokens that the longest row held before, padding included, or more.
        past_B: int64, tokens that each row held before, without padding; None: all rows held `past`.
        real_BT: bool, which of the new tokens are not padding; None: all.
        even: all rows held `past` tokens, and nothing is padding.
        right: padding only follows a row's tokens.
        row_B: int64, the cache's row of each row of the batch; None: all, in their order.
        adjacent: these rows as a slice; None: they are not adjacent.
        fresh: no row has held a token.
        step: one token a row; states are written while layers run.
        shared: what layers computed from these numbers, for others like them.
    """

    past: int
    past_B: Tensor | None = None
    real_BT: Tensor | None = None
    even: bool = True
    right: bool = False
    row_B: Tensor | None = None
    adjacent: slice | None = field(default_factory=lambda: slice(None))
    fresh: bool = False
    step: bool = False
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def on(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`past_B` and `row_B` of `batch` rows, on a device."""
        if device not in self.shared:
            past_B = torch.full((batch,), self.past, device=device) if self.past_B is None else self.past_B
            row_B = torch.arange(batch, device=device) if self.row_B is None else self.row_B
            self.shared[device] = past_B.to(device), row_B.to(device)
        return self.shared[device]


@dataclass(frozen=True)
class AttentionCall:
    """The keyword argument `attention_call` of a linearized model or its decoder, for one forward pass.

    A cache filled in one mode cannot be used in the other.

    Attributes:
        mode: "hybrid", what the layers were made for, or "softmax", the attention of the base model.
        observe: called by every attention layer of a softmax pass over whole sequences (use_cache=False), with keyword
            arguments module (its `HybridAttention`, None without linear heads), layer_idx, q [B, H, T, D], k and v
            [B, G, T, D], y_softmax [B, H, T, D], and call: scale, softcap, sink_logits, sliding_window and
            cu_seqlens of the layer, as `softmax_attention` takes them; with cu_seqlens B is 1, see `Packing`.
        gates: by layer, [G] shares of softmax attention in the output of each KV head, the rest being its hybrid
            attention; in a hybrid pass over whole sequences, for layers without exact heads.
        backend: of hybrid attention, see `lolcats.ops.hybrid_attention`.
        packing: which tokens form a sequence, if there is padding or several documents in a row. This and what follows
            is filled in on the way to the attention function.
        rows: which rows of the cache the tokens belong to; None: all, which have no padding.
        layer: the cache layer that attention adds the tokens to; None: there is no cache.
        operator: computes the attention of a compiled layer.
    """

    mode: str = "hybrid"
    observe: Callable[..., None] | None = None
    gates: Mapping[int, Tensor] | None = None
    backend: str = "auto"
    packing: Packing | None = None
    rows: Rows | None = None
    layer: Any = None
    operator: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("hybrid", "softmax"):
            raise ValueError(f"mode={self.mode!r}: expected hybrid or softmax")
        if self.observe is not None and self.mode != "softmax":
            raise ValueError("observe sees softmax attention: set mode='softmax'")
        if self.gates is not None and self.mode != "hybrid":
            raise ValueError("gates mix hybrid attention with softmax attention: set mode='hybrid'")


HYBRID = AttentionCall()
SOFTMAX = AttentionCall(mode="softmax")

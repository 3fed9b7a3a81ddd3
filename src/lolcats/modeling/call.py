"""What one forward pass wants of the linearized layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

# Keyword under which it travels from the caller through transformers' modules to the attention function.
ATTENTION_CALL = "attention_call"
# Keyword under which a `Packing` travels from the decoder to the attention function.
PACKING = "lolcats_packing"


@dataclass(frozen=True)
class AttentionCall:
    """The keyword argument `attention_call` of a linearized model or its decoder, for one forward pass.

    A cache filled in one mode cannot be used in the other.

    Attributes:
        mode: "hybrid", what the layers were made for, or "softmax", the attention of the base model.
        observe: called by every linearized layer of a softmax pass over whole sequences (use_cache=False), with
            keyword arguments module (the layer's `HybridAttention`), layer_idx, q [B, H, T, D], k and v
            [B, G, T, D], y_softmax [B, H, T, D], and call: scale, softcap, sink_logits, sliding_window and
            cu_seqlens of the layer, as `softmax_attention` takes them; with cu_seqlens B is 1, see `Packing`.
        gates: by layer, [G] shares of softmax attention in the output of each KV head, the rest being its hybrid
            attention; in a hybrid pass over whole sequences, for layers without exact heads.
        backend: of hybrid attention, see `lolcats.ops.hybrid_attention`.
    """

    mode: str = "hybrid"
    observe: Callable[..., None] | None = None
    gates: Mapping[int, Tensor] | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in ("hybrid", "softmax"):
            raise ValueError(f"mode={self.mode!r}: expected hybrid or softmax")
        if self.observe is not None and self.mode != "softmax":
            raise ValueError("observe sees softmax attention: set mode='softmax'")
        if self.gates is not None and self.mode != "hybrid":
            raise ValueError("gates mix hybrid attention with softmax attention: set mode='hybrid'")


HYBRID = AttentionCall()
SOFTMAX = AttentionCall(mode="softmax")

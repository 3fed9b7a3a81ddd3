"""What one forward pass wants of the linearized layers, and what they need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lolcats.modeling.softmax import Visible
from lolcats.ops import Scoring

# Keyword under which it travels from the caller through transformers' modules to the attention function.
ATTENTION_CALL = "attention_call"


@dataclass(frozen=True)
class Packing:
    """Which tokens of a batch [B, T] are no padding: one row [1, N] of them, one sequence after the other, and back.

    Attributes:
        token_N: int64, their places among the batch's B * T.
        packs_layers: it is applied to the decoder's inputs, so that layers get one row; else to queries, keys and
            values, because layers without attention know no sequences in a row.
    """

    batch: int
    tokens: int
    token_N: Tensor
    packs_layers: bool = True

    def pack(self, x: Tensor, dim: int = 0) -> Tensor:
        """[..., B, T, ...], B at `dim`, to [..., 1, N, ...]."""
        return x.flatten(dim, dim + 1).index_select(dim, self.token_N.to(x.device)).unsqueeze(dim)

    def unpack(self, y_1N: Tensor) -> Tensor:
        """[1, N, ...] to [B, T, ...], with zeros for padding."""
        zeros = y_1N.new_zeros(self.batch * self.tokens, *y_1N.shape[2:])
        return zeros.index_copy(0, self.token_N.to(y_1N.device), y_1N[0]).unflatten(0, (self.batch, self.tokens))


@dataclass(frozen=True)
class Rows:
    """The sequences of a pass, and the rows of a cache to which their tokens are added.

    Without `cu_seqlens` each row of the batch is a sequence, of as many tokens as the others; with them the tokens are
    one packed row.

    Attributes:
        past, end: tokens that the longest row holds before and after, padding included, or more.
        past_B: int64, tokens that each row held before, without padding; negative: it does not exist. None: all held
            `past`.
        row_B: int64, the cache's row of each sequence; None: all, in their order.
        adjacent: these rows as a slice, if nothing is packed; None: they are not adjacent.
        fresh: no row has held a token.
        cu_seqlens: int32 [sequences + 1], borders in a row of N tokens, from 0; padding may follow.
        host: on the host `cu_seqlens`, and (row, tokens) of each sequence before the pass; None: it does not know them,
            and there is one sequence, which is fresh.
        shared: what layers computed from these numbers, for others like them.
    """

    past: int
    end: int
    past_B: Tensor | None = None
    row_B: Tensor | None = None
    adjacent: slice | None = field(default_factory=lambda: slice(None))
    fresh: bool = False
    cu_seqlens: Tensor | None = None
    host: tuple[list[int], list[tuple[int, int]]] | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict, init=False)

    @classmethod
    def packed(cls, held: list[tuple[int, int]], count: list[int], past: int, end: int, device: torch.device) -> Rows:
        """Of sequences that get `count` tokens more."""
        borders, (row_B, past_B) = [0, *accumulate(count)], torch.tensor(held, device=device).T
        fresh, cu_seqlens = not any(past for _, past in held), torch.tensor(borders, dtype=torch.int32, device=device)
        return cls(past, end, past_B, row_B, None, fresh, cu_seqlens, (borders, held))

    @property
    def step(self) -> bool:
        """Whether there is one token a row; states are written while layers run."""
        return self.cu_seqlens is None and self.end - self.past == 1

    def on(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`past_B` and `row_B` of `batch` rows, on a device."""
        if device not in self.shared:
            past_B = torch.full((batch,), self.past, device=device) if self.past_B is None else self.past_B
            row_B = torch.arange(len(past_B), device=device) if self.row_B is None else self.row_B
            self.shared[device] = past_B.to(device), row_B.to(device)
        return self.shared[device]


class Observed(NamedTuple):
    """An attention layer of a softmax pass, with its `HybridAttention`, None without linear heads.

    q and y_softmax are [B, H, T, D], k and v [B, G, T, D]; B is 1 with `visible.cu_seqlens`, a tensor.
    """

    module: Any
    layer_idx: int
    q: Tensor
    k: Tensor
    v: Tensor
    y_softmax: Tensor
    scoring: Scoring
    visible: Visible


@dataclass(frozen=True)
class AttentionCall:
    """The keyword argument `attention_call` of a linearized model or its decoder, for one forward pass.

    A cache filled in one mode cannot be used in the other.

    Attributes:
        mode: "hybrid", what the layers were made for, or "softmax", the attention of the base model.
        observe: called with every attention layer of a softmax pass over whole sequences (use_cache=False).
        gates: by layer, [G] shares of softmax attention in the output of each KV head, the rest being its hybrid
            attention; in a hybrid pass over whole sequences, for layers without exact heads.
        backend: of hybrid attention, see `lolcats.ops.hybrid_attention`.
        rows: the pass's sequences; None: its rows, which have no padding. This and what follows is filled in on the
            way to the attention function.
        packing: makes the batch of the caller one row without padding; None: `rows` are not packed, or were already.
        layer: the cache layer that attention adds the tokens to; None: there is no cache.
        operator: computes the attention of a compiled layer.
    """

    mode: str = "hybrid"
    observe: Callable[[Observed], None] | None = None
    gates: Mapping[int, Tensor] | None = None
    backend: str = "auto"
    rows: Rows | None = None
    packing: Packing | None = None
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

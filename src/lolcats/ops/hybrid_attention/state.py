"""What a layer gives to hybrid attention, and the fixed-size state: all that a sequence needs to continue.

Shape suffixes used throughout: B batch, H query heads, G key/value heads, R = H / G query heads per
key/value head, S state heads (G or H), T tokens, D head_dim, P columns of the projection, F features.
The function itself is described in `lolcats.config.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.eight_bits import FACTOR_BYTES, is_packed
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS

# Keeps the quotient defined where every feature product underflows or is exactly zero (ReLU features).
DENOMINATOR_FLOOR = 1e-12


class Scoring(NamedTuple):
    """How a layer of the base model makes the scores of softmax attention.

    Attributes:
        sink_logits: [H] or None; an extra score without a value in every row (GPT-OSS).
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2); None: there is none.
    """

    sink_logits: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether they are more than scaled products: fused attention takes no others."""
        return self.softcap is not None or self.sink_logits is not None

    def scale_of(self, q: Tensor) -> float:
        """The factor of the scores of these queries."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


class HybridParams(NamedTuple):
    """The learnable tensors of one layer, and its `Scoring`.

    Attributes:
        window_factor: [H]; gamma, the factor of the window's terms, is its sigmoid.
        q_weight: [H, D, P] projection of the query feature map, or None without a linear part.
        k_weight: [S, D, P] projection of the key feature map. S = G shares one state among the R query
            heads of a group; S = H keeps one state per query head.
        q_bias, k_bias: [H, P], [S, P] or None.
    """

    window_factor: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    sink_logits: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of their fields."""
        return self[:6]

    @property
    def gamma(self) -> Tensor:
        return self.window_factor.sigmoid()

    def scale_of(self, q: Tensor) -> float:
        return Scoring(scale=self.scale).scale_of(q)


class HybridState(NamedTuple):
    """State after `position` tokens of each sequence. Its size does not depend on `position`.

    Attributes:
        S: [B, S, F, D] sum of phi_k(k_j) v_j^T over the tokens that left the window; float32 (float64
            with float64 inputs). Empty (F = 0) without a linear part.
        z: [B, S, F] sum of phi_k(k_j) over the same tokens.
        k, v: [B, G, C, D] ring of the latest tokens' keys and values: the token at position p is in
            slot p % C. Slots of tokens that left the window keep stale contents. Or packed, [B, G, C, D + 4], see
            `lolcats.ops.eight_bits`; then the sinks are, too.
        sink_k, sink_v: [B, G, sinks, D] keys and values of the first tokens.
        position: [B] int64, tokens seen so far.
    """

    S: Tensor
    z: Tensor
    k: Tensor
    v: Tensor
    sink_k: Tensor
    sink_v: Tensor
    position: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> HybridState:
        """Apply `function` to every tensor."""
        return HybridState(*map(function, self))

    def clone(self) -> HybridState:
        return self.map(torch.clone)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)


class Tokens(NamedTuple):
    """Queries, keys and values of N tokens, and where their outputs are written."""

    q_NHD: Tensor
    k_NGD: Tensor
    v_NGD: Tensor
    y_NHD: Tensor
    heads_G: Tensor | None = None  # int64, the key/value heads to compute; others are not read or written. None: all

    def part(self, tokens: slice) -> Tokens:
        return Tokens(self.q_NHD[tokens], self.k_NGD[tokens], self.v_NGD[tokens], self.y_NHD[tokens], self.heads_G)

    def select(self, x: Tensor) -> Tensor:
        """Of queries, keys or values those of `heads_G`."""
        if self.heads_G is None:
            return x
        return x.unflatten(1, (self.k_NGD.shape[1], -1)).index_select(1, self.heads_G).flatten(1, 2)

    def put(self, y_NHD: Tensor) -> None:
        """Write the outputs of `heads_G`."""
        if self.heads_G is None:
            self.y_NHD.copy_(y_NHD)
        else:
            whole = self.y_NHD.unflatten(1, (self.k_NGD.shape[1], -1))
            whole.index_copy_(1, self.heads_G, y_NHD.unflatten(1, (len(self.heads_G), -1)))


class PagedStep(NamedTuple):
    """Where one token of each of B sequences finds its state and writes its output; `heads_G` as in `Tokens`."""

    page_B: Tensor  # int32; sequences with page 0 do not exist
    y_BH1D: Tensor  # is anything for sequences that do not exist
    heads_G: Tensor | None


class Sequences(NamedTuple):
    """N sequences whose tokens are one row, and where their states are.

    page_2N: a pair of int64 [N], the pages where each state is read and written. All that are written are different.
    cut: places of sequences of which the next one is the rest: their states are kept in pages of their own, too.
    """

    page_2N: tuple[Tensor, ...]
    position_N: Tensor  # int64, tokens that each sequence has seen
    cu_seqlens: Tensor  # borders, [N + 1]
    seen: tuple[int, ...] | None  # the numbers in `position_N`, if the host knows them
    borders: tuple[int, ...] | None = None  # those in `cu_seqlens`
    cut: tuple[int, ...] = ()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which products are formed and summed: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def initial_state(
    config: AttentionConfig,
    params: HybridParams,
    k_BGTD: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    packed: bool = False,
    cleared: bool = True,
) -> HybridState:
    """The state before the first token of the sequences whose keys look like `k_BGTD`; its windows may be packed.

    cleared: False: all but the position is uninitialised, for kernels that write all of it.
    """
    new = k_BGTD.new_zeros if cleared else k_BGTD.new_empty
    batch, kv_heads, _, head_dim = k_BGTD.shape
    width, kind = (head_dim + FACTOR_BYTES, torch.int8) if packed else (head_dim, k_BGTD.dtype)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    state_heads, features, sums = kv_heads, 0, accumulation_dtype(k_BGTD.dtype)
    if config.feature_map is not None and params.k_weight is not None:
        state_heads = params.k_weight.shape[0]
        features = params.k_weight.shape[2] * FEATURE_MAPS[config.feature_map].multiple
    return HybridState(
        S=new(sequences, state_heads, features, head_dim, dtype=sums),
        z=new(sequences, state_heads, features, dtype=sums),
        k=new(sequences, kv_heads, config.capacity, width, dtype=kind),
        v=new(sequences, kv_heads, config.capacity, width, dtype=kind),
        sink_k=new(sequences, kv_heads, config.sinks, width, dtype=kind),
        sink_v=new(sequences, kv_heads, config.sinks, width, dtype=kind),
        position=k_BGTD.new_zeros(sequences, dtype=torch.int64),
    )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd needs what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def keeps_eight_bits(config: AttentionConfig, state: HybridState | None, *qkv: Tensor) -> bool:
    """Whether keys and values are rounded to 8 bits: as the state has them, or a new one without autograd."""
    asked = config.cache_bits == 8 and config.window_size > 0 and not needs_gradient(*qkv)
    return asked if state is None else is_packed(state.k)


def ring_positions(position_B: Tensor, capacity: int) -> Tensor:
    """[B, C] position of the token in each ring slot after `position_B` tokens; negative: never written."""
    slot_C = torch.arange(capacity, device=position_B.device)
    last_B1 = position_B[:, None] - 1
    return last_B1 - (last_B1 - slot_C) % max(capacity, 1)


def once(shared: dict[Hashable, Any] | None, build: Callable[..., Any], *sources: Any) -> Any:
    """`build(*sources)`, made once for all calls with one `shared`: the layers of a forward pass, which give the same
    tensors. On a GPU a table made from borders of sequences costs some twenty launches."""
    if shared is None or torch.compiler.is_compiling():
        return build(*sources)
    key = build, *[x.device if isinstance(x, Tensor) else x for x in sources]
    if key not in shared:
        shared[key] = build(*sources)
    return shared[key]


def push_tokens(state: HybridState, config: AttentionConfig, k_BGTD: Tensor, v_BGTD: Tensor) -> HybridState:
    """Ring, sinks and position after the new tokens of every row; see `hybrid_attention`.

    S and z are returned as they are: what left the window is the caller's to fold.
    """
    tokens, position_B = k_BGTD.shape[2], state.position
    ring_BC = ring_positions(position_B + tokens, config.capacity)
    sinks_BC = torch.arange(config.sinks, device=position_B.device).expand(len(position_B), -1)

    def gather(wanted_BC: Tensor, old_BGCD: Tensor, new_BGTD: Tensor) -> Tensor:
        """The tokens at the wanted positions, from the new ones where they are among them, else the old ones."""
        if wanted_BC.shape[1] == 0 or tokens == 0:
            return old_BGCD
        token_B1C1 = (wanted_BC - position_B[:, None])[:, None, :, None]
        found_BGCD = new_BGTD.take_along_dim(token_B1C1.clamp(0, tokens - 1), 2)
        return torch.where((token_B1C1 >= 0) & (token_B1C1 < tokens), found_BGCD.to(old_BGCD.dtype), old_BGCD)

    return state._replace(
        k=gather(ring_BC, state.k, k_BGTD),
        v=gather(ring_BC, state.v, v_BGTD),
        sink_k=gather(sinks_BC, state.sink_k, k_BGTD),
        sink_v=gather(sinks_BC, state.sink_v, v_BGTD),
        position=position_B + tokens,
    )

"""The fixed-size state of hybrid attention: all that a sequence needs to continue."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig


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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which products are formed and summed: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def push_tokens(
    state: HybridState,
    config: AttentionConfig,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    shared: dict[Hashable, Any] | None = None,
) -> HybridState:
    """Ring, sinks and position after the new tokens; see `hybrid_attention`.

    S and z are returned as they are: what left the window is the caller's to fold.
    """
    tokens = k_BGTD.shape[2]
    length_N, ring, sinks = once(shared, _latest_and_first, config, state.position, cu_seqlens, tokens)

    def gather(wanted: tuple[Tensor, Tensor], old_NGCD: Tensor, new_BGTD: Tensor) -> Tensor:
        """The requested tokens, from the new ones where they are among them, else the old ones."""
        index_NC, is_new_NC = wanted
        if index_NC.shape[1] == 0 or tokens == 0:
            return old_NGCD
        if cu_seqlens is None:
            found_NGCD = new_BGTD.take_along_dim(index_NC[:, None, :, None], 2)
        else:
            found_NGCD = new_BGTD[0].transpose(0, 1)[index_NC].transpose(1, 2)
        return torch.where(is_new_NC[:, None, :, None], found_NGCD.to(old_NGCD.dtype), old_NGCD)

    return state._replace(
        k=gather(ring, state.k, k_BGTD),
        v=gather(ring, state.v, v_BGTD),
        sink_k=gather(sinks, state.sink_k, k_BGTD),
        sink_v=gather(sinks, state.sink_v, v_BGTD),
        position=state.position + length_N,  # each layer's own, as steps write it
    )


def _latest_and_first(
    config: AttentionConfig, position_N: Tensor, cu_seqlens: Tensor | None, tokens: int
) -> tuple[Tensor | int, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """How many new tokens there are; for the ring's slots and for the sinks the new token of each and whether it has
    one, both [N, C]."""
    start_N1: Tensor | int = 0
    length_N: Tensor | int = tokens
    if cu_seqlens is not None:
        start_N1, length_N = cu_seqlens[:-1, None].long(), cu_seqlens.diff().long()
    end_N = position_N + length_N
    found = []
    for wanted_NC in (ring_positions(end_N, config.capacity), torch.arange(config.sinks, device=end_N.device)):
        offset_NC = wanted_NC - position_N[:, None]
        is_new_NC = (offset_NC >= 0) & (wanted_NC < end_N[:, None])
        found.append(((start_N1 + offset_NC).clamp(0, max(tokens - 1, 0)), is_new_NC))
    return length_N, found[0], found[1]

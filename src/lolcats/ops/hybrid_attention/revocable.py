"""A few tokens with a state, the last ones of which can be taken back: the checks of speculative decoding.

The tokens lie behind the state's position, which stays: adding n to it accepts the first n, and the next call writes
over the others. With a terraced window that costs nothing. Each token has a place of its own in the ring while its
block fills up, what lay there left the window before the block began, and S and z change only with a block's first
token, which is accepted in any case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.equation import attend
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype
from lolcats.ops.hybrid_attention.step import fold_leaving, join_tokens, visible_slots


def revocable_step(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    length_B: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, with `revocable`. Of a row without tokens (`length_B` 0) the state stays as it is."""
    dtype = accumulation_dtype(q_BHTD.dtype)
    batch, tokens = len(q_BHTD), q_BHTD.shape[2]
    if not inplace:
        state = state.clone()
    if length_B is None:
        length_B = torch.full_like(state.position, tokens)
    step_T = torch.arange(tokens, device=q_BHTD.device)
    position_BT = state.position[:, None] + step_T
    is_new_BT = step_T < torch.minimum(length_B, config.room_at(state.position))[:, None]
    fold_leaving(config, params, state, k_BGTD, v_BGTD, length_B > 0, dtype)
    for buffers, place_BT, written_BT in (
        ((state.k, state.v), position_BT % config.capacity, is_new_BT),
        ((state.sink_k, state.sink_v), position_BT, is_new_BT & (position_BT < config.sinks)),
    ):
        row_N, step_N = written_BT.nonzero(as_tuple=True)
        for buffer, new_BGTD in zip(buffers, (k_BGTD, v_BGTD), strict=True):
            buffer[row_N, :, place_BT[row_N, step_N]] = new_BGTD[row_N, :, step_N].to(buffer.dtype)
    y_BHTD = attend(
        q_BHTD.to(dtype),
        join_tokens(state.sink_k, state.k).to(dtype),
        join_tokens(state.sink_v, state.v).to(dtype),
        visible_slots(config, position_BT.flatten()).unflatten(0, (batch, tokens)),
        position_BT,
        state.S,
        state.z,
        config,
        params,
        scale,
        softcap,
    )
    return y_BHTD.masked_fill(~is_new_BT[:, None, :, None], 0.0).to(q_BHTD.dtype), state

"""Hybrid attention with a sparse cache, many tokens at once: the function of `sparse_cache`, on any device.

Tokens lie on a grid of N blocks of the window's size, aligned with the sequence's own blocks. When block n begins, the
block that then leaves the window competes with the cache. Which tokens keep a slot depends on all choices before, so
there one block follows the other (`sparse_choice`). All else is known for all blocks at once: keys, moments and their
Cholesky factors before the choices, sums and outputs after them.

Of each key/value head, keys lie in a pool: sinks, slots of the cache, ring and new tokens; then values. Which row of
the pool goes where is mostly known before the choices, the same in all layers, and a `Plan`.

Shape suffixes beyond those of `sparse_cache`: N blocks, L tokens of a block, C slots, J = C + L, M = C + N L
candidates, W tokens of the window, E = B N, X and Y what is listed flat, 2 keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.chunked import PIECE_TOKENS
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.remember import remembered
from lolcats.ops.hybrid_attention.sparse_cache import attend, key_features, per_state, pick, take
from lolcats.ops.hybrid_attention.sparse_choice import Leverage, Recall, choose
from lolcats.ops.hybrid_attention.sparse_plan import Plan, plans
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype

# Tokens of a pass on a GPU, over all sequences, where a piece of each would be shorter: the host launches as much for
# few tokens as for many.
GPU_TOKENS = 8192


def sparse_chunked(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    fresh: bool = True,
    length_B: Tensor | None = None,
    need_state: bool = True,
    use_kernel: bool = False,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`; token t of sequence b is real iff t < length_B[b] (None: all are).

    `fresh`: the state is the initial one. `use_kernel`: choose in a Triton kernel where there is one. `need_state` is
    what other implementations take; here it saves nothing.
    """
    batch, heads, tokens, _ = q_BHTD.shape
    if tokens == 0:
        return q_BHTD, state
    piece = PIECE_TOKENS
    if torch.is_grad_enabled():
        piece = tokens
    elif q_BHTD.is_cuda:
        piece = max(piece, GPU_TOKENS // batch)
    # What lengths and positions say is the same in all layers; of sequences that begin, no tensor is needed to say it.
    position_B, sizes = (None if fresh else state.position), (batch, heads, k_BGTD.shape[1], tokens, piece)
    found = remembered(plans, spec, position_B, length_B, sizes, q_BHTD.device)
    outputs = []
    for index, plan in enumerate(found):
        q, k, v = (x[:, :, index * piece : (index + 1) * piece] for x in (q_BHTD, k_BGTD, v_BGTD))
        y_BHTD, state = _piece(q, k, v, spec, params, scale, softcap, state, plan, use_kernel)
        outputs.append(y_BHTD)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)), state


def _piece(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    scale: float,
    softcap: float | None,
    state: HybridState,
    plan: Plan,
    use_kernel: bool,
) -> tuple[Tensor, HybridState]:
    dtype = accumulation_dtype(q_BHTD.dtype)
    keys, values = [state.sink_k, state.cache_k, state.k, k_BGTD], [state.sink_v, state.cache_v, state.v, v_BGTD]
    pool_XD = torch.cat(keys + values, dim=2).to(dtype).flatten(0, 2)
    k_BGMD, v_BGMD = _rows(pool_XD, plan.candidate_2BGM)
    phi_BSMF, v_BSMD = key_features(k_BGMD, spec, params), per_state(v_BGMD, params)

    key_moment = state.key_moment
    scores: Leverage | Recall
    if spec.cache_by == "leverage":
        scatter_BGNDD, mean_BGND = _moments(key_moment, k_BGMD.detach(), plan)
        key_moment = torch.cat([scatter_BGNDD[:, :, -1], mean_BGND[:, :, -1:]], dim=2)
        scores = Leverage(k_BGMD, mean_BGND, scatter_BGNDD, plan.count_BN)
    else:
        scores = Recall(phi_BSMF, v_BSMD, state.S, state.z, k_BGMD.shape[1])
    slots_BGNC, gone_BGNL, folds_BGNL = choose(plan.exists_BNJ, spec.sparse_cache, scores, use_kernel=use_kernel)

    blocks = (slots_BGNC.shape[2], -1)
    phi_BSNLF = pick(phi_BSMF, gone_BGNL.flatten(2)).unflatten(2, blocks) * per_state(folds_BGNL, params)[..., None]
    v_BSNLD = pick(v_BSMD, gone_BGNL.flatten(2)).unflatten(2, blocks)
    S_BSNFD = state.S[:, :, None] + (phi_BSNLF.mT @ v_BSNLD).cumsum(2)
    z_BSNF = state.z[:, :, None] + phi_BSNLF.sum(-2).cumsum(2)

    index_2BGY = slots_BGNC.flatten(2).expand(2, -1, -1, -1)
    slot_2BGNC = plan.candidate_2BGM.gather(3, index_2BGY).unflatten(3, blocks)
    kept = (state.sink_k, state.sink_v, state.k, state.v, state.cache_k, state.cache_v)
    stays_X = torch.cat([plan.stays_X, slot_2BGNC[..., -1, :].flatten()])
    stays_XD = pool_XD.index_select(0, stays_X).to(state.k.dtype)
    sink_k, sink_v, k, v, cache_k, cache_v = (
        new_XD.view(old.shape)
        for new_XD, old in zip(stays_XD.split([old[..., 0].numel() for old in kept]), kept, strict=True)
    )
    after = HybridState(
        S=S_BSNFD[:, :, -1],
        z=z_BSNF[:, :, -1],
        key_moment=key_moment,
        k=k,
        v=v,
        sink_k=sink_k,
        sink_v=sink_v,
        cache_k=cache_k,
        cache_v=cache_v,
        position=state.position + plan.length_B,
    )

    # Queries see sinks, cache, and the window up to themselves; blocks lie in the batch.
    seen_2BNGJ = torch.cat([plan.sink_2BNGX, slot_2BGNC.transpose(2, 3), plan.window_2BNGW], dim=4)
    q_BNHLD = take(q_BHTD, plan.query_BY).unflatten(2, blocks).transpose(1, 2)
    k_EGJD, v_EGJD = _rows(pool_XD, seen_2BNGJ.flatten(1, 2))
    y_EHLD = attend(
        q_BNHLD.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1),
        k_EGJD,
        v_EGJD,
        plan.hidden_ELJ,
        plan.position_EL,
        _in_batch(S_BSNFD),
        _in_batch(z_BSNF),
        spec,
        params,
        scale,
        softcap,
    )
    batch, heads, tokens, _ = q_BHTD.shape
    y_XD = y_EHLD.flatten(0, 2).index_select(0, plan.output_X)
    y_BHTD = y_XD.to(q_BHTD.dtype).view(batch, tokens, heads, -1).transpose(1, 2)
    if plan.padding_B1T1 is not None:
        y_BHTD = y_BHTD.masked_fill(plan.padding_B1T1, 0.0)
    return y_BHTD, after


def _rows(pool_XD: Tensor, index_2x: Tensor) -> tuple[Tensor, ...]:
    """Keys and values, [..., D] each."""
    return pool_XD.index_select(0, index_2x.flatten()).view(*index_2x.shape, -1).unbind(0)


def _in_batch(x_BSNx: Tensor) -> Tensor:
    """[B, S, N, ...] -> [B N, S, ...]."""
    return x_BSNx.transpose(1, 2).flatten(0, 1)


def _moments(moment_BGAD: Tensor, k_BGMD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Both parts of `HybridState.key_moment`, sums [B, G, N, D, D] and mean [B, G, N, D], with the block that leaves.

    Sums are of deviations from the mean of all, for the reason that `sparse_cache` has for its own.
    """
    scatter_BGDD, mean_BGD = moment_BGAD[..., :-1, :], moment_BGAD[..., -1, :]
    shape, before_B11 = plan.absent_B1NL1.shape[2:4], plan.before_B11
    left_BGNLD = k_BGMD[:, :, -shape.numel() :].unflatten(2, shape).masked_fill(plan.absent_B1NL1, 0.0)
    centre_BGD = (before_B11 * mean_BGD + left_BGNLD.sum((2, 3))) / plan.count_BN[:, -1, None, None]

    deviation_BGNLD = (left_BGNLD - centre_BGD[:, :, None, None]).masked_fill(plan.absent_B1NL1, 0.0)
    before_BGD = mean_BGD - centre_BGD
    sum_BGND = (before_B11 * before_BGD)[:, :, None] + deviation_BGNLD.sum(3).cumsum(2)
    square_BGDD = scatter_BGDD + before_B11[..., None] * (before_BGD[..., :, None] * before_BGD[..., None, :])
    square_BGNDD = square_BGDD[:, :, None] + (deviation_BGNLD.mT @ deviation_BGNLD).cumsum(2)
    mean_BGND = sum_BGND / plan.count_BN[:, None, :, None]
    scatter_BGNDD = square_BGNDD - mean_BGND[..., :, None] * sum_BGND[..., None, :]
    return scatter_BGNDD, mean_BGND + centre_BGD[:, :, None]

"""Hybrid attention with a sparse cache, many tokens at once: `step_by_step` faster, on any device.

Tokens lie on a grid of N blocks of the window's size, aligned with the sequence's own blocks. When block n begins, the
block that then leaves the window competes with the cache. Which tokens keep a slot depends on all choices before, so
there one block follows the other (`choose`). All else is known for all blocks at once: keys, moments and their
Cholesky factors before the choices, sums and outputs after them.

Of each key/value head, keys lie in a pool: sinks, slots of the cache, ring and new tokens; then values. Which row of
the pool goes where is mostly known before the choices, and a `Plan`.

Shape suffixes beyond those of `params`: N blocks, L tokens of a block, C slots, J = C + L, M = C + N L candidates (the
slots of the cache as it comes in, then the tokens that leave, block after block), W tokens of the window, E = B N, X
and Y what is listed flat, 2 keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.chunked import PIECE_TOKENS
from lolcats.ops.hybrid_attention.equation import attend, key_features, repeat_heads
from lolcats.ops.hybrid_attention.kernels.support import supports_choice
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.sparse_cache import cached, compete, covariance_factor, pick, take
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype, ring_positions

# Tokens of a pass on a GPU, over all sequences, where a piece of each would be shorter: the host launches as much for
# few tokens as for many.
GPU_TOKENS = 8192


def sparse_chunked(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
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
    piece = PIECE_TOKENS
    if torch.is_grad_enabled():
        piece = max(tokens, 1)
    elif q_BHTD.is_cuda:
        piece = max(piece, GPU_TOKENS // max(batch, 1))
    outputs = []
    for begin in range(0, tokens, piece):
        q, k, v = (x[:, :, begin : begin + piece] for x in (q_BHTD, k_BGTD, v_BGTD))
        count = q.shape[2]
        rest_B = torch.full_like(state.position, count) if length_B is None else (length_B - begin).clamp(0, count)
        shape, first = (heads, k.shape[1], count), fresh and begin == 0
        plan = _plan(config, state.position, rest_B, *shape, fresh=first, padded=length_B is not None)
        y_BHTD, state = _piece(q, k, v, config, params, scale, softcap, state, plan, use_kernel)
        outputs.append(y_BHTD)
    return (torch.cat(outputs, dim=2) if len(outputs) > 1 else [*outputs, q_BHTD][0]), state


def _piece(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
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

    scatter_BGNDD, mean_BGND = _moments(state.key_moment, k_BGMD.detach(), plan)
    factor_BGNDD = covariance_factor(scatter_BGNDD, plan.count_BN[:, None])
    identity_DD = torch.eye(k_BGMD.shape[3], dtype=dtype, device=k_BGMD.device)
    whiten_BGNDD = torch.linalg.solve_triangular(factor_BGNDD, identity_DD, upper=False)
    contest = (k_BGMD.detach(), mean_BGND, whiten_BGNDD, plan.exists_BNJ, config.sparse_cache)
    if use_kernel and supports_choice(k_BGMD, plan.exists_BNJ.shape[2]) is None:
        from lolcats.ops.hybrid_attention.kernels.eviction import choose_op  # imports Triton

        slots_BGNC, evicted_BGNL, folds_BGNL = choose_op(*contest)
    else:
        slots_BGNC, evicted_BGNL, folds_BGNL = choose(*contest)

    blocks = (slots_BGNC.shape[2], -1)
    phi_BSMF = key_features(k_BGMD, config, params)
    states = phi_BSMF.shape[1]
    phi_BSNLF = pick(phi_BSMF, evicted_BGNL.flatten(2)).unflatten(2, blocks)
    phi_BSNLF = phi_BSNLF * repeat_heads(folds_BGNL, states)[..., None]
    v_BSNLD = repeat_heads(pick(v_BGMD, evicted_BGNL.flatten(2)), states).unflatten(2, blocks)
    S_BSNFD = state.S[:, :, None] + (phi_BSNLF.mT @ v_BSNLD).cumsum(2)
    z_BSNF = state.z[:, :, None] + phi_BSNLF.sum(-2).cumsum(2)

    index_2BGY = slots_BGNC.flatten(2).expand(2, -1, -1, -1)
    slot_2BGNC = plan.candidate_2BGM.gather(3, index_2BGY).unflatten(3, blocks)
    stays = {name: getattr(state, name) for name in ("sink_k", "sink_v", "k", "v", "cache_k", "cache_v")}
    stays_X = torch.cat([plan.stays_X, slot_2BGNC[..., -1, :].flatten()])
    stays_XD = pool_XD.index_select(0, stays_X).to(state.k.dtype)
    parts = stays_XD.split([old[..., 0].numel() for old in stays.values()])
    after = HybridState(
        S=S_BSNFD[:, :, -1],
        z=z_BSNF[:, :, -1],
        key_moment=torch.cat([scatter_BGNDD[:, :, -1], mean_BGND[:, :, -1:]], dim=2),
        position=state.position + plan.length_B,
        **{name: new.view(old.shape) for (name, old), new in zip(stays.items(), parts, strict=True)},
    )

    # Queries see sinks, cache, and the window up to themselves; blocks lie in the batch.
    seen_2BNGJ = torch.cat([plan.sink_2BNGX, slot_2BGNC.transpose(2, 3), plan.window_2BNGW], dim=4)
    q_BNHLD = take(q_BHTD, plan.query_BY).unflatten(2, blocks).transpose(1, 2)
    k_EGJD, v_EGJD = _rows(pool_XD, seen_2BNGJ.flatten(1, 2))
    y_EHLD = attend(
        q_BNHLD.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1),
        k_EGJD,
        v_EGJD,
        plan.seen_ELJ,
        plan.position_EL,
        _in_batch(S_BSNFD),
        _in_batch(z_BSNF),
        config,
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


@torch.no_grad()
def choose(
    k_BGMD: Tensor, mean_BGND: Tensor, whiten_BGNDD: Tensor, exists_BNJ: Tensor, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates in the slots [B, G, N, C], those evicted [B, G, N, L], and which of these exist.

    Only indices go from block to block, and there is nothing to differentiate.

    Args:
        k_BGMD: keys of the candidates.
        mean_BGND, whiten_BGNDD: when block n begins a key's score is |whiten (k - mean)|^2, its leverage.
        exists_BNJ: bool, which candidates there are when block n begins.
    """
    batch, blocks, _ = exists_BNJ.shape
    index_M = torch.arange(k_BGMD.shape[2], device=k_BGMD.device)
    slots_BGC = index_M[:slots].expand(batch, k_BGMD.shape[1], -1)
    chosen = []
    for n, new_L in enumerate(index_M[slots:].view(blocks, -1)):
        index_BGJ = torch.cat([slots_BGC, new_L.expand(*slots_BGC.shape[:2], -1)], dim=2)
        deviation_BGJD = pick(k_BGMD, index_BGJ) - mean_BGND[:, :, n, None]
        score_BGJ = (deviation_BGJD @ whiten_BGNDD[:, :, n].mT).square().sum(-1)
        retained_BGC, evicted_BGL, folds_BGL = compete(score_BGJ, exists_BNJ[:, n], slots)
        slots_BGC = index_BGJ.gather(2, retained_BGC)
        chosen.append((slots_BGC, index_BGJ.gather(2, evicted_BGL), folds_BGL))
    slots_BGNC, evicted_BGNL, folds_BGNL = (torch.stack(each, dim=2) for each in zip(*chosen, strict=True))
    return slots_BGNC, evicted_BGNL, folds_BGNL


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


@dataclass(frozen=True)
class Plan:
    """Where the tokens of a piece lie, which follows from positions and lengths. Rows are those of the flat pool.

    Attributes:
        length_B: new tokens.
        exists_BNJ: which candidates there are when block n begins.
        absent_B1NL1: which tokens of the block that leaves there are not.
        before_B11, count_BN: how many tokens had left before the piece, and up to block n, 1 at least.
        query_BY: new token of each query [N, L].
        candidate_2BGM, sink_2BNGX, window_2BNGW: rows.
        seen_ELJ: which of sinks, cache and window a query sees; E = B N.
        position_EL: of the queries.
        stays_X: rows of the next state's sinks, keys and values, and then of its ring.
        output_X: row of the output [B, N, H, L] of each new token, as [B, T, H].
        padding_B1T1: tokens that do not exist; None: there are none.
    """

    length_B: Tensor
    exists_BNJ: Tensor
    absent_B1NL1: Tensor
    before_B11: Tensor
    count_BN: Tensor
    query_BY: Tensor
    candidate_2BGM: Tensor
    sink_2BNGX: Tensor
    window_2BNGW: Tensor
    seen_ELJ: Tensor
    position_EL: Tensor
    stays_X: Tensor
    output_X: Tensor
    padding_B1T1: Tensor | None


def _plan(
    config: AttentionConfig,
    position_B: Tensor,
    length_B: Tensor,
    heads: int,
    kv_heads: int,
    tokens: int,
    *,
    fresh: bool,
    padded: bool,
) -> Plan:
    size, slots, batch = config.window_size, config.sparse_cache, len(position_B)
    last = 0 if fresh else size - 1  # of the places in its block where the first token may be
    blocks = -(-(last + tokens) // size)
    old = config.sinks + slots  # rows before the ring
    pool = old + config.capacity + tokens
    first_B1, end_B1 = position_B[:, None], (position_B + length_B)[:, None]

    def index(count: int, begin: int = 0) -> Tensor:
        return torch.arange(begin, begin + count, device=position_B.device)

    def filled(position_BN: Tensor) -> Tensor:
        """[B, N, C] bool: the slots that are filled for a query there."""
        return index(slots) < cached(config, position_BN)[..., None]

    def token(position_BX: Tensor) -> Tensor:
        """Place among the new tokens; any, where there is none."""
        return (position_BX - first_B1).clamp(0, tokens - 1)

    def latest(position_BX: Tensor) -> Tensor:
        """Row in the ring or among the new tokens."""
        row_BX = torch.where(
            position_BX < first_B1, position_BX % config.capacity, config.capacity + token(position_BX)
        )
        return old + row_BX

    def both(row_BX: Tensor) -> Tensor:
        """[2, B, G, X] rows of the flat pool for keys and values of each head."""
        first_2BG = index(batch * kv_heads).view(1, batch, kv_heads) * 2 * pool + index(2)[:, None, None] * pool
        return first_2BG[..., None] + row_BX[None, :, None]

    start_BN = first_B1 - first_B1 % size + index(blocks) * size
    begins_BN = (start_BN >= first_B1) & (start_BN < end_B1) & (start_BN >= config.capacity)
    left_BNL, query_BNL = start_BN[..., None] + index(size, -config.capacity), start_BN[..., None] + index(size)
    leaves_BNL = (left_BNL >= config.sinks) & begins_BN[..., None]
    slot_BC = (config.sinks + index(slots)).expand(batch, -1)
    before_B1 = (config.window_start(first_B1 - 1) - config.sinks).clamp_min(0)

    window_BNW = start_BN[..., None] + index(config.capacity, -config.reach)
    window_2BGY = both(latest(window_BNW.flatten(1)))
    sees = [
        (index(config.sinks) <= query_BNL[..., None]).expand(-1, -1, -1, config.sinks),
        filled(start_BN)[:, :, None].expand(-1, -1, size, -1),
        (window_BNW >= config.sinks)[:, :, None] & (window_BNW[:, :, None] <= query_BNL[..., None]),
    ]

    sink_BX = index(config.sinks).expand(batch, -1)
    is_new_BX = (sink_BX >= first_B1) & (sink_BX < end_B1)
    sink_2BGX = both(torch.where(is_new_BX, old + config.capacity + token(sink_BX), sink_BX))
    ring_2BGX = both(latest(ring_positions(end_B1[:, 0], config.capacity)))

    entry_BT1 = (first_B1 % size + index(tokens))[..., None]
    block_BT1 = index(batch)[:, None, None] * blocks + entry_BT1 // size
    return Plan(
        length_B=length_B,
        exists_BNJ=torch.cat([filled(start_BN - 1) & begins_BN[..., None], leaves_BNL], dim=2),
        absent_B1NL1=~leaves_BNL[:, None, ..., None],
        before_B11=before_B1[..., None],
        count_BN=(before_B1 + leaves_BNL.sum(-1).cumsum(1)).clamp_min(1),
        query_BY=token(query_BNL.flatten(1)),
        candidate_2BGM=both(torch.cat([slot_BC, latest(left_BNL.flatten(1))], dim=1)),
        sink_2BNGX=sink_2BGX[:, :, None].expand(-1, -1, blocks, -1, -1),
        window_2BNGW=window_2BGY.unflatten(3, (blocks, -1)).transpose(2, 3),
        seen_ELJ=torch.cat(sees, dim=3).flatten(0, 1),
        position_EL=query_BNL.flatten(0, 1),
        stays_X=torch.cat([sink_2BGX.flatten(), ring_2BGX.flatten()]),
        output_X=((block_BT1 * heads + index(heads)) * size + entry_BT1 % size).flatten(),
        padding_B1T1=(index(tokens) >= length_B[:, None])[:, None, :, None] if padded else None,
    )

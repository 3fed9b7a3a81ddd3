"""Hybrid attention with a sparse cache, many tokens at once: the function of `sparse_cache`, on any device.

Tokens lie on a grid of N blocks of the window's size, aligned with the sequence's own blocks. When block n begins, the
block that then leaves the window competes with the cache. Which tokens keep a slot depends on all choices before, so
there one block follows the other (`sparse_choice`). All else is known for all blocks at once: keys, moments and their
Cholesky factors before the choices, sums and outputs after them.

Shape suffixes beyond those of `sparse_cache`: N blocks, L tokens of a block, C slots, J = C + L, M = C + N L
candidates, W tokens of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.chunked import PIECE_TOKENS
from lolcats.ops.hybrid_attention.sparse_cache import attend
from lolcats.ops.hybrid_attention.sparse_cache import cached
from lolcats.ops.hybrid_attention.sparse_cache import key_features
from lolcats.ops.hybrid_attention.sparse_cache import per_state
from lolcats.ops.hybrid_attention.sparse_cache import pick
from lolcats.ops.hybrid_attention.sparse_cache import take
from lolcats.ops.hybrid_attention.sparse_choice import Leverage
from lolcats.ops.hybrid_attention.sparse_choice import Recall
from lolcats.ops.hybrid_attention.sparse_choice import choose
from lolcats.ops.hybrid_attention.spec import HybridParams
from lolcats.ops.hybrid_attention.spec import HybridSpec
from lolcats.ops.hybrid_attention.state import HybridState
from lolcats.ops.hybrid_attention.state import accumulation_dtype
from lolcats.ops.hybrid_attention.state import push_tokens

# Tokens of a pass on a GPU, over all sequences, where a piece of each would be shorter: the host launches as much for
# few tokens as for many.
GPU_TOKENS = 8192


def sparse_chunked(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: HybridSpec,
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
    tokens = q_BHTD.shape[2]
    if tokens == 0:
        return q_BHTD, state
    if length_B is None:
        length_B = torch.full_like(state.position, tokens)
    piece = PIECE_TOKENS
    if torch.is_grad_enabled():
        piece = tokens
    elif q_BHTD.is_cuda:
        piece = max(piece, GPU_TOKENS // q_BHTD.shape[0])
    outputs = []
    for begin in range(0, tokens, piece):
        q, k, v = (x[:, :, begin : begin + piece] for x in (q_BHTD, k_BGTD, v_BGTD))
        grid = _Grid.of(spec, state, (length_B - begin).clamp(0, piece), k, v, fresh=fresh and begin == 0)
        y_BHTD, state = _piece(q, k, v, spec, params, scale, softcap, state, grid, use_kernel)
        outputs.append(y_BHTD)
    return torch.cat(outputs, dim=2), state


@dataclass
class _Grid:
    """Where the blocks of all sequences begin, and keys and values by position.

    Attributes:
        start_BN: position of each block's first token.
        position_B, length_B: tokens before these, and new ones.
        k_BGPD, v_BGPD: the ring of the state, then the new tokens, in the type of the sums.
    """

    spec: HybridSpec
    start_BN: Tensor
    position_B: Tensor
    length_B: Tensor
    k_BGPD: Tensor
    v_BGPD: Tensor

    @classmethod
    def of(
        cls, spec: HybridSpec, state: HybridState, length_B: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, fresh: bool
    ) -> _Grid:
        size = spec.window_size
        latest = 0 if fresh else size - 1  # of the places in its block where the first token may be
        blocks = -(-(latest + k_BGTD.shape[2]) // size)
        index_N = torch.arange(blocks, device=k_BGTD.device)
        start_BN = (state.position - state.position % size)[:, None] + index_N * size
        dtype = accumulation_dtype(k_BGTD.dtype)
        pools = (torch.cat([old.to(dtype), new.to(dtype)], 2) for old, new in ((state.k, k_BGTD), (state.v, v_BGTD)))
        return cls(spec, start_BN, state.position, length_B, *pools)

    @property
    def leaves_BN(self) -> Tensor:
        """bool: where a block leaves the window, because the next one begins among the new tokens."""
        first_B1 = self.position_B[:, None]
        begins_BN = (self.start_BN >= first_B1) & (self.start_BN < first_B1 + self.length_B[:, None])
        return begins_BN & (self.start_BN >= self.spec.capacity)

    def positions(self, first: int, count: int) -> Tensor:
        """[B, N, count] from the block's begin + `first` on."""
        return self.start_BN[..., None] + torch.arange(first, first + count, device=self.start_BN.device)

    def new(self, position_BNX: Tensor) -> Tensor:
        """[B, N X] index among the new tokens; any, where there is none."""
        tokens = self.k_BGPD.shape[2] - self.spec.capacity
        return (position_BNX - self.position_B[:, None, None]).clamp(0, tokens - 1).flatten(1)

    def index(self, position_BNX: Tensor) -> Tensor:
        """[B, N X] index in `k_BGPD`; any, where there is none."""
        is_old_BY = (position_BNX < self.position_B[:, None, None]).flatten(1)
        slot_BY = (position_BNX % self.spec.capacity).flatten(1)
        return torch.where(is_old_BY, slot_BY, self.spec.capacity + self.new(position_BNX))


def _piece(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    spec: HybridSpec,
    params: HybridParams,
    scale: float,
    softcap: float | None,
    state: HybridState,
    grid: _Grid,
    use_kernel: bool,
) -> tuple[Tensor, HybridState]:
    dtype, size = grid.k_BGPD.dtype, spec.window_size
    left_BNL = grid.positions(-spec.capacity, size)
    exists_BNJ = torch.cat([_filled(spec, grid.start_BN - 1), left_BNL >= spec.sinks], dim=2)
    exists_BNJ = exists_BNJ & grid.leaves_BN[..., None]
    index_BY = grid.index(left_BNL)
    k_BGMD = torch.cat([state.cache_k.to(dtype), take(grid.k_BGPD, index_BY)], dim=2)
    v_BGMD = torch.cat([state.cache_v.to(dtype), take(grid.v_BGPD, index_BY)], dim=2)
    phi_BSMF, v_BSMD = key_features(k_BGMD, spec, params), per_state(v_BGMD, params)

    key_moment = state.key_moment
    scores: Leverage | Recall
    if spec.cache_by == "leverage":
        before_B = (spec.window_start(grid.position_B - 1) - spec.sinks).clamp_min(0)
        new_BNL = exists_BNJ[..., spec.sparse_cache :]
        moment_BGNAD, count_BN = _moments(key_moment, before_B, k_BGMD.detach(), new_BNL)
        key_moment = moment_BGNAD[:, :, -1]
        scores = Leverage(k_BGMD, moment_BGNAD.detach(), count_BN)
    else:
        scores = Recall(phi_BSMF, v_BSMD, state.S, state.z, k_BGMD.shape[1])
    slots_BGNC, gone_BGNL, folds_BGNL = choose(exists_BNJ, spec.sparse_cache, scores, use_kernel=use_kernel)

    blocks = (grid.start_BN.shape[1], -1)
    phi_BSNLF = pick(phi_BSMF, gone_BGNL.flatten(2)).unflatten(2, blocks) * per_state(folds_BGNL, params)[..., None]
    v_BSNLD = pick(v_BSMD, gone_BGNL.flatten(2)).unflatten(2, blocks)
    S_BSNFD = state.S[:, :, None] + (phi_BSNLF.mT @ v_BSNLD).cumsum(2)
    z_BSNF = state.z[:, :, None] + phi_BSNLF.sum(-2).cumsum(2)
    after = replace(
        push_tokens(state, spec, k_BGTD, v_BGTD, grid.length_B),
        S=S_BSNFD[:, :, -1],
        z=z_BSNF[:, :, -1],
        cache_k=pick(k_BGMD, slots_BGNC[:, :, -1]).to(state.cache_k.dtype),
        cache_v=pick(v_BGMD, slots_BGNC[:, :, -1]).to(state.cache_v.dtype),
        key_moment=key_moment,
    )

    # Queries see sinks, cache, and the window up to themselves; blocks lie in the batch.
    query_BNL, window_BNW = grid.positions(0, size), grid.positions(-spec.reach, spec.capacity)
    q_BHND = take(q_BHTD.to(dtype), grid.new(query_BNL)).unflatten(2, blocks)
    sink = (torch.arange(spec.sinks, device=query_BNL.device) <= query_BNL[..., None]).expand(-1, -1, -1, spec.sinks)
    cache = _filled(spec, grid.start_BN)[:, :, None].expand(-1, -1, size, -1)
    window = (window_BNW >= spec.sinks)[:, :, None] & (window_BNW[:, :, None] <= query_BNL[..., None])
    index_BY = grid.index(window_BNW)

    def seen(sinks: Tensor, cached_BGMD: Tensor, pool_BGPD: Tensor) -> Tensor:
        sinks = sinks.to(dtype)[:, :, None].expand(-1, -1, blocks[0], -1, -1)
        slots = pick(cached_BGMD, slots_BGNC.flatten(2)).unflatten(2, blocks)
        return _in_batch(torch.cat([sinks, slots, take(pool_BGPD, index_BY).unflatten(2, blocks)], dim=3))

    y = attend(
        _in_batch(q_BHND),
        seen(after.sink_k, k_BGMD, grid.k_BGPD),
        seen(after.sink_v, v_BGMD, grid.v_BGPD),
        ~torch.cat([sink, cache, window], dim=3).flatten(0, 1),
        _in_batch(S_BSNFD),
        _in_batch(z_BSNF),
        spec,
        params,
        scale,
        softcap,
    )
    y_BHED = y.unflatten(0, (-1, blocks[0])).transpose(1, 2).flatten(2, 3)
    t_T = torch.arange(q_BHTD.shape[2], device=y.device)
    y_BHTD = take(y_BHED, (grid.position_B % size)[:, None] + t_T)
    real_BT = t_T < grid.length_B[:, None]
    return y_BHTD.masked_fill(~real_BT[:, None, :, None], 0.0).to(q_BHTD.dtype), after


def _filled(spec: HybridSpec, position_BN: Tensor) -> Tensor:
    """[B, N, C] bool: the slots that are filled for a query there."""
    return torch.arange(spec.sparse_cache, device=position_BN.device) < cached(spec, position_BN)[..., None]


def _in_batch(x_BGNX: Tensor) -> Tensor:
    """[B, G, N, ...] -> [B N, G, ...]."""
    return x_BGNX.transpose(1, 2).flatten(0, 1)


def _moments(moment_BGAD: Tensor, before_B: Tensor, k_BGMD: Tensor, new_BNL: Tensor) -> tuple[Tensor, Tensor]:
    """`HybridState.key_moment` [B, G, N, D + 1, D] with the block that leaves, and the number of keys [B, N].

    Sums are of deviations from the mean of all, for the reason that `sparse_cache` has for its own.
    """
    new_BN, dtype = new_BNL.sum(-1), moment_BGAD.dtype
    count_BN = before_B[:, None] + new_BN.cumsum(1)
    before_B11 = before_B[:, None, None].to(dtype)
    scatter_BGDD, mean_BGD = moment_BGAD[..., :-1, :], moment_BGAD[..., -1, :]
    new_B1NL1 = new_BNL[:, None, :, :, None]
    left_BGNLD = k_BGMD[:, :, -new_BNL[0].numel() :].unflatten(2, new_BNL.shape[1:]).where(new_B1NL1, 0.0)
    total_B11 = count_BN[:, -1, None, None].clamp_min(1).to(dtype)
    centre_BGD = (before_B11 * mean_BGD + left_BGNLD.sum((2, 3))) / total_B11

    deviation_BGNLD = (left_BGNLD - centre_BGD[:, :, None, None]).where(new_B1NL1, 0.0)
    before_BGD = mean_BGD - centre_BGD
    sum_BGND = (before_B11 * before_BGD)[:, :, None] + deviation_BGNLD.sum(3).cumsum(2)
    square_BGDD = scatter_BGDD + before_B11[..., None] * (before_BGD[..., :, None] * before_BGD[..., None, :])
    square_BGNDD = square_BGDD[:, :, None] + (deviation_BGNLD.mT @ deviation_BGNLD).cumsum(2)
    mean_BGND = sum_BGND / count_BN[:, None, :, None].clamp_min(1)
    scatter_BGNDD = square_BGNDD - mean_BGND[..., :, None] * sum_BGND[..., None, :]
    return torch.cat([scatter_BGNDD, (mean_BGND + centre_BGD[:, :, None])[..., None, :]], dim=3), count_BN

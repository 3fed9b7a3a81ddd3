"""Hybrid attention in linear time and memory, in plain PyTorch, on any device.

Tokens are laid out on a grid of N chunks of c tokens, aligned with the terraced blocks. With d = config.reach,
and entry e of an array delayed by d holding key e - d, the queries [n c, n c + c) of chunk n find

    every key of their windows                                  in entries [n c, n c + c + d),
    keys that are linear for some of them and not for others    in entries [n c, n c + c),
    keys that are linear for all of them                        in entries before n c.

The masks inside a chunk are the same for every chunk; the last kind of keys is an exclusive cumulative sum
of chunk states.

Shape suffixes beyond those of `state`: E grid entries (E = N c), M rows of one chunk, (query heads of a
key/value or state head) x c.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig, replaced
from lolcats.ops.eight_bits import dense
from lolcats.ops.hybrid_attention.equation import (
    key_features,
    query_features,
    quotient,
    repeat_heads,
    scores,
    softmax_weights,
)
from lolcats.ops.hybrid_attention.state import HybridParams, HybridState, accumulation_dtype, push_tokens

MIN_CHUNK_TOKENS = 64
# Without autograd, longer inputs are processed in pieces of this many tokens: bounded memory, warm caches.
PIECE_TOKENS = 2048


def chunked(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    state: HybridState,
    fresh: bool = True,
    need_state: bool = True,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`.

    `fresh`: the state is the initial one.
    `need_state`: whether the returned state will be used.
    """
    tokens, inputs = q_BHTD.shape[2], (q_BHTD, k_BGTD, v_BGTD)
    if tokens == 0:
        return q_BHTD, state
    positions = ([] if fresh else state.position.tolist()) or [0]
    if len(set(positions)) > 1:  # blocks begin at other tokens in each row
        rows = zip(*(x.split(1) for x in (*inputs, *state)), strict=True)
        found = [chunked(q, k, v, config, params, state=HybridState(*one), fresh=False) for q, k, v, *one in rows]
        after = HybridState(*map(torch.cat, zip(*(row_state for _, row_state in found), strict=True)))
        return torch.cat([y_1HTD for y_1HTD, _ in found]), after
    piece = tokens if torch.is_grad_enabled() else PIECE_TOKENS
    outputs = []
    for begin in range(0, tokens, piece):
        q, k, v = (x[:, :, begin : begin + piece] for x in inputs)
        grid = Grid(config, positions[0] + begin, q.shape[2], q.device)
        y_BHTD, state = _piece(q, k, v, config, params, state, grid, need_state or begin + piece < tokens)
        outputs.append(y_BHTD)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)), state


class Grid:
    """Where old and new tokens of sequences lie on the grid: entry e is the token at position base + e.

    It starts at the first token that is not in the state's sums yet; the first `prior` entries come from the state's
    ring. Sums of the keys before `end` are the state after the new tokens.
    """

    def __init__(self, config: AttentionConfig, position: int, tokens: int, device: torch.device) -> None:
        if position == 0 and config.window_size > tokens:  # all in the window anyhow: no wider grid than needed
            config = replaced(config, window_size=tokens)
        self.config, self.tokens = config, tokens
        self.base, self.end = (config.window_start(end - 1) for end in (position, position + tokens))
        self.prior = position - self.base
        self.chunk = MIN_CHUNK_TOKENS
        if config.window == "terraced" and config.window_size > 0:
            self.chunk = config.window_size * -(-MIN_CHUNK_TOKENS // config.window_size)
        self.chunks = -(-(self.prior + tokens) // self.chunk)
        self.position_E = self.base + torch.arange(self.chunks * self.chunk, device=device)

    def place(self, new_BHTD: Tensor, ring_BHCD: Tensor | None, dtype: torch.dtype) -> Tensor:
        """New tokens, after those in the ring if given, on the grid: [B, H, E, D] in `dtype`."""
        x, before = new_BHTD.to(dtype), self.prior
        if ring_BHCD is not None and before:
            slots = self.position_E[:before] % ring_BHCD.shape[2]
            x, before = torch.cat([ring_BHCD.index_select(2, slots).to(dtype), x], dim=2), 0
        return pad(x, (0, 0, before, len(self.position_E) - before - x.shape[2]))

    def pick(self, y_BHED: Tensor) -> Tensor:
        """The new tokens' entries: [B, H, T, D]."""
        return y_BHED[:, :, self.prior : self.prior + self.tokens]


def _piece(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    state: HybridState,
    grid: Grid,
    need_state: bool,
) -> tuple[Tensor, HybridState]:
    dtype = accumulation_dtype(q_BHTD.dtype)
    after = state
    if need_state or config.sinks:
        after = push_tokens(state, config, k_BGTD, v_BGTD)
    config = grid.config
    q_BHED = grid.place(q_BHTD, None, dtype)
    kept = (k_BGTD, state.k, v_BGTD, state.v)
    k_BGTD, k_BGCD, v_BGTD, v_BGCD = (dense(x, q_BHTD.dtype) for x in kept)
    k_BGED = grid.place(k_BGTD, k_BGCD, dtype)
    v_BGED = grid.place(v_BGTD, v_BGCD, dtype)

    parts = []
    if config.has_softmax:
        sinks = [dense(x, q_BHTD.dtype).to(dtype) for x in (after.sink_k, after.sink_v)]
        parts.append(_softmax_part(q_BHED, k_BGED, v_BGED, config, params, grid, sinks))
    if config.feature_map is not None:
        numerator, denominator, S, z = _linear_part(q_BHED, k_BGED, v_BGED, config, params, grid, state, need_state)
        parts.append((numerator, denominator))
        if need_state:
            after = after._replace(S=S, z=z)
    numerators, denominators = zip(*parts, strict=True)
    y_BHTD = grid.pick(quotient(sum(numerators[1:], numerators[0]), sum(denominators[1:], denominators[0])))
    return y_BHTD.to(q_BHTD.dtype), after


def _softmax_part(
    q_BHED: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    grid: Grid,
    sinks: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Numerator [B, H, E, D] and denominator [B, H, E, 1] of the window and the sinks, keys and values [B, G, ., D]."""
    heads, kv_heads = q_BHED.shape[1], k_BGED.shape[1]
    c, d = grid.chunk, config.reach
    q_BGNMD = _rows(q_BHED, kv_heads, grid)

    position_Nc1 = grid.position_E.view(grid.chunks, c, 1)
    keys, values, masks = [], [], []
    if config.window_size > 0:
        # unfold makes the window [D, c + d] the last dimensions: the transposed keys that matmul wants
        keys.append(pad(k_BGED, (0, 0, d, 0)).unfold(2, c + d, c).mT)
        values.append(pad(v_BGED, (0, 0, d, 0)).unfold(2, c + d, c).mT)
        # [N, c, c + d]: key column u of chunk n is entry n c + u - d
        key_N1W = position_Nc1[:, :1] + torch.arange(-d, c, device=position_Nc1.device)
        first_Nc1 = config.window_start(position_Nc1).clamp_min(max(grid.base, config.sinks))
        masks.append((key_N1W >= first_Nc1) & (key_N1W <= position_Nc1))
    if config.sinks > 0:
        for found, sinks_BGSD in zip((keys, values), sinks, strict=True):
            found.append(sinks_BGSD[:, :, None].expand(-1, -1, grid.chunks, -1, -1))
        masks.append(torch.arange(config.sinks, device=position_Nc1.device) <= position_Nc1)

    parts = [scores(q_BGNMD, key_BGNWD, params) for key_BGNWD in keys]
    score_BGNRcW = torch.cat(parts, dim=-1).unflatten(3, (heads // kv_heads, c))
    sink = params.sink_logits
    sink_GNRc1 = None if sink is None else sink.to(q_BHED.dtype).view(kv_heads, 1, -1, 1, 1)
    share_BGNRcW, mass, total = softmax_weights(score_BGNRcW, torch.cat(masks, dim=-1)[:, None], sink_GNRc1)
    gamma_HE1 = config.gamma_at(params.gamma.to(q_BHED.dtype)[:, None, None], grid.position_E[:, None])
    mean_BGNMD = share_BGNRcW.flatten(3, 4) @ (torch.cat(values, dim=-2) if len(values) > 1 else values[0])
    mass_BHE1, total_BHE1 = (_unrows(x_BGNRc1.flatten(3, 4), heads) for x_BGNRc1 in (mass, total))
    return gamma_HE1 * mass_BHE1 * _unrows(mean_BGNMD, heads), gamma_HE1 * total_BHE1


def _linear_part(
    q_BHED: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    grid: Grid,
    state: HybridState,
    need_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numerator [B, H, E, D] and denominator [B, H, E, 1] of the linear part, S and z after the piece."""
    phi_k_BSEF = key_features(k_BGED, config, params)
    heads, state_heads, c = q_BHED.shape[1], phi_k_BSEF.shape[1], grid.chunk

    def delay(x_BSED: Tensor) -> Tensor:
        """Move every entry config.reach later, as chunks [B, S, N, c, .]; zeros come in."""
        entries = x_BSED.shape[2]
        delayed = pad(x_BSED[:, :, : max(entries - config.reach, 0)], (0, 0, min(config.reach, entries), 0))
        return delayed.unflatten(2, (grid.chunks, c))

    if need_state or config.sinks > 0:
        # Only what has left the window at the end may be summed, and sinks never.
        keep_E = grid.position_E >= config.sinks
        if need_state:
            keep_E = keep_E & (grid.position_E < grid.end)
        phi_k_BSEF = phi_k_BSEF * keep_E[:, None]
    phi_k_BSNcF, v_BSNcD = delay(phi_k_BSEF), delay(repeat_heads(v_BGED, state_heads))

    phi_q_BSNMF = _rows(query_features(q_BHED, config, params), state_heads, grid)

    added_S = _prefix_sums(phi_k_BSNcF.transpose(-1, -2) @ v_BSNcD)
    added_z = _prefix_sums(phi_k_BSNcF.sum(-2))
    if grid.base:
        added_S = added_S + state.S[:, :, None]
        added_z = added_z + state.z[:, :, None]
    numerator = phi_q_BSNMF @ added_S[:, :, :-1]
    denominator = phi_q_BSNMF @ added_z[:, :, :-1, :, None]

    mask_cc = _inner_mask(config, grid)
    if mask_cc is not None:
        weight_BSNMc = phi_q_BSNMF @ phi_k_BSNcF.transpose(-1, -2)
        weight_BSNMc = (weight_BSNMc.unflatten(3, (heads // state_heads, c)) * mask_cc).flatten(3, 4)
        numerator = numerator + weight_BSNMc @ v_BSNcD
        denominator = denominator + weight_BSNMc.sum(-1, keepdim=True)
    return _unrows(numerator, heads), _unrows(denominator, heads), added_S[:, :, -1], added_z[:, :, -1]


def _prefix_sums(x_BSNx: Tensor) -> Tensor:
    """[B, S, N, ...] -> [B, S, N + 1, ...]: sums of the first 0, 1, ..., N entries along N.

    A product with a triangle of ones is faster than cumsum and its backward for the few chunks that there are.
    """
    chunks = x_BSNx.shape[2]
    before = torch.ones(chunks + 1, chunks, dtype=x_BSNx.dtype, device=x_BSNx.device).tril(-1)
    return (before @ x_BSNx.flatten(3)).unflatten(3, x_BSNx.shape[3:])


def _inner_mask(config: AttentionConfig, grid: Grid) -> Tensor | None:
    """[c, c] bool: which delayed keys of a chunk are linear for which of its queries; None: none."""
    row_c1 = torch.arange(grid.chunk, device=grid.position_E.device)[:, None]
    if config.window == "sliding" or config.window_size == 0:
        return row_c1 >= row_c1.T
    if grid.chunk == config.window_size:
        return None
    block_c1 = row_c1 // config.window_size
    return block_c1 > block_c1.T


def _rows(x_BHEX: Tensor, groups: int, grid: Grid) -> Tensor:
    """[B, H, E, X] -> [B, groups, N, M, X]: all query heads that share keys, one chunk at a time."""
    x = x_BHEX.unflatten(1, (groups, -1)).unflatten(3, (grid.chunks, grid.chunk))
    return x.transpose(2, 3).flatten(3, 4)


def _unrows(x_BSNMX: Tensor, heads: int) -> Tensor:
    """Inverse of `_rows`: [B, S, N, M, X] -> [B, H, E, X]."""
    x = x_BSNMX.unflatten(3, (heads // x_BSNMX.shape[1], -1))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

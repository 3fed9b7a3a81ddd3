"""Where the tokens of a pass lie for `sparse_chunked`: all that follows from positions and lengths.

Layers differ in none of it, so it is computed once for all of them. Shape suffixes are those of `sparse_chunked`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.sparse_cache import cached
from lolcats.ops.hybrid_attention.state import ring_positions


@dataclass(frozen=True)
class Plan:
    """Where the tokens of a piece lie: all that follows from positions and lengths. Rows are those of the flat pool.

    Attributes:
        length_B: new tokens.
        exists_BNJ: which candidates there are when block n begins.
        absent_B1NL1: which tokens of the block that leaves there are not.
        before_B11, count_BN: how many tokens had left before the piece, and up to block n, 1 at least.
        query_BY: new token of each query [N, L].
        candidate_2BGM, sink_2BNGX, window_2BNGW: rows.
        hidden_ELJ: which of sinks, cache and window a query does not see; E = B N.
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
    hidden_ELJ: Tensor
    position_EL: Tensor
    stays_X: Tensor
    output_X: Tensor
    padding_B1T1: Tensor | None


def plans(
    spec: AttentionConfig,
    position_B: Tensor | None,
    length_B: Tensor | None,
    sizes: tuple[int, ...],
    device: torch.device,
) -> list[Plan]:
    """Of every piece. `position_B`: None, if all sequences begin; `length_B`: None, if all tokens are real."""
    batch, heads, kv_heads, tokens, piece = sizes
    before_B = torch.zeros(batch, dtype=torch.int64, device=device) if position_B is None else position_B
    found = []
    for begin in range(0, tokens, piece):
        count = min(piece, tokens - begin)
        rest_B = torch.full_like(before_B, count) if length_B is None else (length_B - begin).clamp(0, count)
        fresh = position_B is None and begin == 0
        found.append(plan(spec, before_B, rest_B, heads, kv_heads, count, fresh=fresh, padded=length_B is not None))
        before_B = before_B + rest_B
    return found


def plan(
    spec: AttentionConfig,
    position_B: Tensor,
    length_B: Tensor,
    heads: int,
    kv_heads: int,
    tokens: int,
    *,
    fresh: bool,
    padded: bool,
) -> Plan:
    size, slots, batch = spec.window_size, spec.sparse_cache, len(position_B)
    last = 0 if fresh else size - 1  # of the places in its block where the first token may be
    blocks = -(-(last + tokens) // size)
    old = spec.sinks + slots  # rows before the ring
    pool = old + spec.capacity + tokens
    first_B1, end_B1 = position_B[:, None], (position_B + length_B)[:, None]

    def index(count: int, begin: int = 0) -> Tensor:
        return torch.arange(begin, begin + count, device=position_B.device)

    def filled(position_BN: Tensor) -> Tensor:
        """[B, N, C] bool: the slots that are filled for a query there."""
        return index(slots) < cached(spec, position_BN)[..., None]

    def token(position_BX: Tensor) -> Tensor:
        """Place among the new tokens; any, where there is none."""
        return (position_BX - first_B1).clamp(0, tokens - 1)

    def latest(position_BX: Tensor) -> Tensor:
        """Row in the ring or among the new tokens."""
        row_BX = torch.where(position_BX < first_B1, position_BX % spec.capacity, spec.capacity + token(position_BX))
        return old + row_BX

    def both(row_BX: Tensor) -> Tensor:
        """[2, B, G, X] rows of the flat pool for keys and values of each head."""
        first_2BG = index(batch * kv_heads).view(1, batch, kv_heads) * 2 * pool + index(2)[:, None, None] * pool
        return first_2BG[..., None] + row_BX[None, :, None]

    start_BN = first_B1 - first_B1 % size + index(blocks) * size
    begins_BN = (start_BN >= first_B1) & (start_BN < end_B1) & (start_BN >= spec.capacity)
    left_BNL, query_BNL = start_BN[..., None] + index(size, -spec.capacity), start_BN[..., None] + index(size)
    leaves_BNL = (left_BNL >= spec.sinks) & begins_BN[..., None]
    slot_BC = (spec.sinks + index(slots)).expand(batch, -1)
    before_B1 = (spec.window_start(first_B1 - 1) - spec.sinks).clamp_min(0)

    window_BNW = start_BN[..., None] + index(spec.capacity, -spec.reach)
    window_2BGY = both(latest(window_BNW.flatten(1)))
    sees = [
        (index(spec.sinks) <= query_BNL[..., None]).expand(-1, -1, -1, spec.sinks),
        filled(start_BN)[:, :, None].expand(-1, -1, size, -1),
        (window_BNW >= spec.sinks)[:, :, None] & (window_BNW[:, :, None] <= query_BNL[..., None]),
    ]

    sink_BX = index(spec.sinks).expand(batch, -1)
    is_new_BX = (sink_BX >= first_B1) & (sink_BX < end_B1)
    sink_2BGX = both(torch.where(is_new_BX, old + spec.capacity + token(sink_BX), sink_BX))
    ring_2BGX = both(latest(ring_positions(end_B1[:, 0], spec.capacity)))

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
        hidden_ELJ=~torch.cat(sees, dim=3).flatten(0, 1),
        position_EL=query_BNL.flatten(0, 1),
        stays_X=torch.cat([sink_2BGX.flatten(), ring_2BGX.flatten()]),
        output_X=((block_BT1 * heads + index(heads)) * size + entry_BT1 % size).flatten(),
        padding_B1T1=(index(tokens) >= length_B[:, None])[:, None, :, None] if padded else None,
    )

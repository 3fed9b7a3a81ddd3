"""What FlashAttention needs of new tokens in a layer's exact heads, in one launch. Importing it needs Triton.

Gathering heads, rounding and vLLM's own launch for keys and values, one after the other, take a token twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.operands import next_power_of_2

FP8 = torch.float8_e4m3fn


def take_heads(
    inputs: Sequence[Tensor], heads_E: Tensor, cache_BETC: Tensor, slot_N: Tensor, scales: Sequence[Tensor]
) -> Tensor:
    """Put keys and values of some heads into vLLM's cache; gives the queries of these heads.

    Args:
        inputs: query, key and value [M, heads * D] of all heads, of N tokens and of others that nobody will read.
        heads_E: int64, the KV heads whose keys and values the cache has.
        cache_BETC: [blocks, E, tokens, 2 D]: keys before values, in the inputs' type or, rounded, in `FP8`.
        slot_N: int64, block * tokens + a token's place in the block; negative: the token is not kept.
        scales: float32, of query, key and value, which are divided by them if the cache has `FP8`.

    Returns:
        [M, E * query heads of a KV head, D], in the type of the cache.
    """
    query, key, _ = inputs
    _, exact, tokens, columns = cache_BETC.shape
    width, group = columns // 2, query.shape[1] // key.shape[1]
    taken = query.new_empty(len(query), exact * group, width, dtype=cache_BETC.dtype)
    if len(query):
        with torch.cuda.device_of(query):
            _kernel[(len(query) * exact,)](
                tuple((x, x.stride(0)) for x in inputs),
                heads_E,
                (cache_BETC, *cache_BETC.stride()[:3]),
                slot_N,
                tuple(scales),
                taken,
                len(slot_N),
                exact,
                TOKENS=tokens,
                GROUP=group,
                D=width,
                ROWS=next_power_of_2(group),
                BLOCK=next_power_of_2(width),
                ROUNDED=cache_BETC.dtype == FP8,
                num_warps=1,
            )
    return taken


@triton.jit
def _rounded(x, scale, ROUNDED: tl.constexpr):
    """As FP8 of the quotient, at most its largest number, or unchanged."""
    if ROUNDED:
        x = tl.div_rn(x.to(tl.float32), scale)
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return x


@triton.jit(do_not_specialize=["kept", "exact"])
def _kernel(
    inputs,
    heads,
    cache,
    slots,
    scales,
    taken,
    kept,
    exact,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One program: a token in one head. All loads are before all stores, so that none waits for another."""
    n = (tl.program_id(0) // exact).to(tl.int64)
    place = (tl.program_id(0) % exact).to(tl.int64)
    head = tl.load(heads + place)
    token = n + tl.arange(0, 1)
    slot = tl.load(slots + token, mask=token < kept, other=-1)
    by_q, by_k, by_v = tl.load(scales[0]), tl.load(scales[1]), tl.load(scales[2])
    column = tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[:, None]
    real = (row < GROUP) & (column < D)[None, :]
    at_q = inputs[0][0] + n * inputs[0][1] + (head * GROUP + row) * D + column[None, :]
    k = tl.load(inputs[1][0] + n * inputs[1][1] + head * D + column, mask=column < D, other=0.0)
    v = tl.load(inputs[2][0] + n * inputs[2][1] + head * D + column, mask=column < D, other=0.0)
    q = tl.load(at_q, mask=real, other=0.0)
    at = cache[0] + slot // TOKENS * cache[1] + place * cache[2] + slot % TOKENS * cache[3] + column
    keep = (column < D) & (slot >= 0)
    tl.store(at, _rounded(k, by_k, ROUNDED), mask=keep)
    tl.store(at + D, _rounded(v, by_v, ROUNDED), mask=keep)
    at = taken + ((n * exact + place) * GROUP + row) * D + column[None, :]
    tl.store(at, _rounded(q, by_q, ROUNDED), mask=real)

"""What FlashAttention needs of new tokens in a layer's exact heads, in one launch. Importing it needs Triton.

Gathering heads, rounding and vLLM's own launch for keys and values, one after the other, take a token twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.operands import launch, next_power_of_2

FP8 = torch.float8_e4m3fn


def take_heads(
    inputs: Sequence[Tensor],
    heads_E: Tensor,
    cache_BETC: Tensor,
    slot_N: Tensor,
    scales: Sequence[Tensor],
    launch: Any = launch,
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
            launch(
                _kernel,
                (len(query) * exact,),
                tuple((x, x.stride(0)) for x in inputs),
                heads_E,
                (cache_BETC, *cache_BETC.stride()[:3]),
                slot_N,
                tuple(scales),
                taken,
                len(slot_N),
                exact,
                tokens,
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
        x = tl.div_rn(x.to(tl.float32), tl.load(scale))
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return x


@triton.jit(do_not_specialize=["kept", "exact", "tokens"])
def _kernel(
    inputs,
    heads,
    cache,
    slots,
    scales,
    taken,
    kept,
    exact,
    tokens,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One program: a token in one head."""
    n = (tl.program_id(0) // exact).to(tl.int64)
    place = (tl.program_id(0) % exact).to(tl.int64)
    head = tl.load(heads + place)
    token = n + tl.arange(0, 1)
    slot = tl.load(slots + token, mask=token < kept, other=-1)
    column = tl.arange(0, BLOCK)
    at = cache[0] + slot // tokens * cache[1] + place * cache[2] + slot % tokens * cache[3] + column
    for i in tl.static_range(1, 3):
        x = tl.load(inputs[i][0] + n * inputs[i][1] + head * D + column, mask=column < D, other=0.0)
        tl.store(at + (i - 1) * D, _rounded(x, scales[i], ROUNDED), mask=(column < D) & (slot >= 0))
    row = tl.arange(0, ROWS)[:, None]
    real = (row < GROUP) & (column < D)[None, :]
    x = tl.load(inputs[0][0] + n * inputs[0][1] + (head * GROUP + row) * D + column[None, :], mask=real, other=0.0)
    at = taken + ((n * exact + place) * GROUP + row) * D + column[None, :]
    tl.store(at, _rounded(x, scales[0], ROUNDED), mask=real)

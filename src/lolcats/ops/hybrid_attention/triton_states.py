"""States before every chunk: prefix sums of phi_k(k)^T [v, 1] over the sequence, in parallel over segments.

The sequence is cut into segments of several chunks. A first launch sums each segment; a second one starts
every segment from the sum of those before it, walks its chunks and writes the state before each of them in
the input type, once, from a float32 accumulator. The sums of single chunks never reach memory in float32,
which would cost more traffic than q, k, v and y together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.triton_common import Operands
from lolcats.ops.hybrid_attention.triton_common import dot
from lolcats.ops.hybrid_attention.triton_common import features
from lolcats.ops.hybrid_attention.triton_common import load_matrix
from lolcats.ops.hybrid_attention.triton_common import load_rows
from lolcats.ops.hybrid_attention.triton_common import load_vector
from lolcats.ops.hybrid_attention.triton_common import or_dummy
from lolcats.ops.hybrid_attention.triton_common import project
from lolcats.ops.hybrid_attention.triton_common import store_matrix
from lolcats.ops.hybrid_attention.triton_common import store_vector
from lolcats.ops.hybrid_attention.triton_common import strides
from lolcats.ops.hybrid_attention.triton_common import tuned
from lolcats.ops.hybrid_attention.triton_common import window_start

# A segment reads the sums of all segments before it: more than this many would cost more than they save.
MAX_SEGMENTS = 16

_CONFIGS = (
    {"BD": 64, "warps": 4, "stages": 2},
    {"BD": 64, "warps": 4, "stages": 3},
    {"BD": 128, "warps": 4, "stages": 2},
    {"BD": 32, "warps": 4, "stages": 3},
)
_WIDE = ({"BD": 64, "warps": 4, "stages": 1}, {"BD": 64, "warps": 4, "stages": 2})


@dataclass(frozen=True)
class States:
    """prefix_S [B, S, N, F, D] (input type) and prefix_z [B, S, N, F] (float32), the state before each of
    the N chunks; final_S [B, S, F, D] and final_z [B, S, F], float32, after all keys that left the window."""

    prefix_S: Tensor
    prefix_z: Tensor
    final_S: Tensor
    final_z: Tensor


def segment_layout(operands: Operands) -> tuple[int, int]:
    """Number of segments, and chunks in each: enough programs to fill the GPU about twice."""
    programs = operands.batch * operands.state_heads * triton.cdiv(operands.head_dim, 64)
    wanted = triton.cdiv(2 * _processors(operands.q.device), programs)
    chunks = triton.cdiv(operands.chunks, max(min(wanted, MAX_SEGMENTS, operands.chunks), 1))
    return triton.cdiv(operands.chunks, chunks), chunks


@functools.lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2  # interpreter: enough that tests see several segments


def chunk_states(operands: Operands) -> States:
    """The states before every chunk, and after all keys that have left the window."""
    x = operands
    assert x.k_weight is not None
    segments, segment_chunks = segment_layout(x)
    shape = (x.batch, x.state_heads)
    empty = functools.partial(torch.empty, device=x.k.device)
    prefix_S = empty(*shape, x.chunks, x.features, x.head_dim, dtype=x.state_dtype)
    prefix_z = empty(*shape, x.chunks, x.features, dtype=torch.float32)
    final_S = empty(*shape, x.features, x.head_dim, dtype=torch.float32)
    final_z = empty(*shape, x.features, dtype=torch.float32)
    total_S = empty(*shape, segments, x.features, x.head_dim, dtype=torch.float32)
    total_z = empty(*shape, segments, x.features, dtype=torch.float32)

    def grid(meta):
        return (x.batch * x.state_heads * segments * triton.cdiv(x.head_dim, meta["BD"]),)

    for emit in (False, True) if segments > 1 else (True,):
        state_kernel(x.head_dim, x.q.dtype)[grid](
            x.k,
            x.v,
            x.k_weight,
            or_dummy(x.k_bias, x.k),
            or_dummy(x.S, x.k),
            or_dummy(x.z, x.k),
            or_dummy(x.length, x.k),
            or_dummy(x.base, x.k),
            total_S,
            total_z,
            prefix_S,
            prefix_z,
            final_S,
            final_z,
            *strides(x.k),
            *strides(x.v),
            x.tokens,
            x.chunks,
            segments,
            segment_chunks,
            HAS_BIAS=x.k_bias is not None,
            HAS_INITIAL=x.S is not None,
            EMIT=emit,
            **x.constants(),
        )
    return States(prefix_S, prefix_z, final_S, final_z)


@tuned(_CONFIGS, _WIDE)
def state_kernel(
    k,
    v,
    weight,
    bias,
    initial_S,
    initial_z,
    length,
    base,
    total_S,
    total_z,
    prefix_S,
    prefix_z,
    final_S,
    final_z,
    k_b,
    k_g,
    k_t,
    v_b,
    v_g,
    v_t,
    tokens,
    chunks,
    segments,
    segment_chunks,
    HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    EMIT: tl.constexpr,  # False: write the segment's own sum; True: the state before each of its chunks
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STATE_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    MAP: tl.constexpr,
    SLIDING: tl.constexpr,
    W: tl.constexpr,
    BLOCKS: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
    HAS_BASE: tl.constexpr,
    CROWDED: tl.constexpr,
    C: tl.constexpr,
    DB: tl.constexpr,
    PB: tl.constexpr,
    BD: tl.constexpr,
):
    """One program: one segment of one state head, BD columns of v."""
    TWO: tl.constexpr = (MAP == "hedgehog") or (MAP == "exp")
    F: tl.constexpr = 2 * P if TWO else P
    DBLOCKS: tl.constexpr = (D + BD - 1) // BD
    program = tl.program_id(0)
    column = program % DBLOCKS * BD
    segment = program // DBLOCKS % segments
    row = program // DBLOCKS // segments  # of [B * S]
    b = (row // STATE_HEADS).to(tl.int64)
    head = row % STATE_HEADS
    g = head // (STATE_HEADS // KV_HEADS)
    k += b * k_b + g * k_g
    v += b * v_b + g * v_g
    FD: tl.constexpr = F * D
    row = row.to(tl.int64)

    limit = tokens
    if HAS_LENGTH:
        limit = tl.minimum(tl.load(length + b), tokens)
    first_position = 0
    if HAS_BASE:
        first_position = tl.load(base + b)
    # Keys from `end` on are in some window at the end of the sequence; no query sees them linearly.
    end = window_start(limit - 1, SLIDING, W, BLOCKS)

    S_plus = tl.zeros([PB, BD], tl.float32)
    S_minus = tl.zeros([PB, BD], tl.float32)
    z_plus = tl.zeros([PB], tl.float32)
    z_minus = tl.zeros([PB], tl.float32)
    if EMIT:
        if HAS_INITIAL:
            S_plus += load_matrix(initial_S + row * FD, column, P, D, PB, BD)
            z_plus += load_vector(initial_z + row * F, P, PB)
            if TWO:
                S_minus += load_matrix(initial_S + row * FD + P * D, column, P, D, PB, BD)
                z_minus += load_vector(initial_z + row * F + P, P, PB)
        for before in tl.range(0, segment):
            total = row * segments + before
            S_plus += load_matrix(total_S + total * FD, column, P, D, PB, BD)
            z_plus += load_vector(total_z + total * F, P, PB)
            if TWO:
                S_minus += load_matrix(total_S + total * FD + P * D, column, P, D, PB, BD)
                z_minus += load_vector(total_z + total * F + P, P, PB)

    weight_DP = load_matrix(weight + head * D * P, 0, D, P, DB, PB).to(k.dtype.element_ty)
    first_chunk = segment * segment_chunks
    # The state before chunk end // C is the last one that a query reads.
    last_chunk = tl.minimum(tl.minimum(first_chunk + segment_chunks, chunks), end // C + 1)
    if not EMIT:  # no segment starts from the sum of the last one
        last_chunk = tl.where(segment == segments - 1, first_chunk, last_chunk)
    for chunk in tl.range(first_chunk, last_chunk):
        k_CD = load_rows(k, chunk * C, k_t, limit, 0, D, C, DB)
        v_CD = load_rows(v, chunk * C, v_t, limit, column, D, C, BD)
        if EMIT:
            at = row * chunks + chunk
            store_matrix(prefix_S + at * FD, S_plus, column, P, D)
            if TWO:
                store_matrix(prefix_S + at * FD + P * D, S_minus, column, P, D)
            if column == 0:
                store_vector(prefix_z + at * F, z_plus, P)
                if TWO:
                    store_vector(prefix_z + at * F + P, z_minus, P)
        x_CP = project(k_CD, weight_DP, bias, head, P, PB, HAS_BIAS)
        plus, minus = features(x_CP, MAP, P)
        entry = chunk * C + tl.arange(0, C)
        keep = entry < end
        if SINKS > 0:
            keep = keep & (first_position + entry >= SINKS)
        plus = tl.where(keep[:, None], plus, 0.0)
        S_plus = dot(tl.trans(plus.to(v_CD.dtype)), v_CD, S_plus)
        z_plus += tl.sum(plus, 0)
        if TWO:
            minus = tl.where(keep[:, None], minus, 0.0)
            S_minus = dot(tl.trans(minus.to(v_CD.dtype)), v_CD, S_minus)
            z_minus += tl.sum(minus, 0)

    if not EMIT:
        total = row * segments + segment
        store_matrix(total_S + total * FD, S_plus, column, P, D)
        if TWO:
            store_matrix(total_S + total * FD + P * D, S_minus, column, P, D)
        if column == 0:
            store_vector(total_z + total * F, z_plus, P)
            if TWO:
                store_vector(total_z + total * F + P, z_minus, P)
    elif segment == segments - 1:
        store_matrix(final_S + row * FD, S_plus, column, P, D)
        if TWO:
            store_matrix(final_S + row * FD + P * D, S_minus, column, P, D)
        if column == 0:
            store_vector(final_z + row * F, z_plus, P)
            if TWO:
                store_vector(final_z + row * F + P, z_minus, P)

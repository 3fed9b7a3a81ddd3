"""Running sums over chunks: what each chunk adds to a state becomes the state before (or after) that chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.common import or_dummy

_CHUNKS = 8  # per step of the loop
# As many as the threads of a program load at once: each thread then adds up its own columns, alone.
_COLUMNS = 512
_WARPS = 2


def scan_chunks(
    S: Tensor, z: Tensor, first_S: Tensor | None, first_z: Tensor | None, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Replace every chunk's entry by the sum of the entries before it (after it, if `reverse`), in place.

    Args:
        S: [B, S, N, F, D] of N chunks, any floating type; z: [B, S, N, F], float32; both contiguous.
        first_S, first_z: [B, S, F, D] and [B, S, F], float32, where the sums begin; None: zero.

    Returns:
        The sums of everything, in the shapes of first_S and first_z; float32.
    """
    batch, heads, chunks, features, head_dim = S.shape
    rows, width = batch * heads, features * head_dim
    end_S = torch.empty(batch, heads, features, head_dim, device=S.device, dtype=torch.float32)
    end_z = torch.empty(batch, heads, features, device=S.device, dtype=torch.float32)
    S_blocks, z_blocks = triton.cdiv(width, _COLUMNS), triton.cdiv(features, _COLUMNS)
    scan_kernel[(rows * (S_blocks + z_blocks),)](
        S,
        z,
        or_dummy(first_S, z),
        or_dummy(first_z, z),
        end_S,
        end_z,
        chunks,
        rows,
        HAS_FIRST_S=first_S is not None,
        HAS_FIRST_Z=first_z is not None,
        REVERSE=reverse,
        WIDTH=width,
        F=features,
        CHUNKS=_CHUNKS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return end_S, end_z


@triton.jit
def _scan_block(
    entries,
    first,
    end,
    column,
    chunks,
    HAS_FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one [chunks, WIDTH] matrix."""
    at = column + tl.arange(0, COLUMNS)
    real = at < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    if HAS_FIRST:
        total += tl.load(first + at, mask=real, other=0.0)
    for begin in tl.range(0, chunks, CHUNKS):
        index = begin + tl.arange(0, CHUNKS)
        mask = (index < chunks)[:, None] & real[None, :]
        if REVERSE:
            address = entries + (chunks - 1 - index).to(tl.int64)[:, None] * WIDTH + at[None, :]
        else:
            address = entries + index.to(tl.int64)[:, None] * WIDTH + at[None, :]
        own = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        before = total[None, :] + tl.cumsum(own, 0) - own
        tl.store(address, before.to(entries.dtype.element_ty), mask=mask)
        total += tl.sum(own, 0)
    tl.store(end + at, total, mask=real)


@triton.jit(do_not_specialize=["chunks", "rows"])
def scan_kernel(
    S,
    z,
    first_S,
    first_z,
    end_S,
    end_z,
    chunks,
    rows,
    HAS_FIRST_S: tl.constexpr,
    HAS_FIRST_Z: tl.constexpr,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    F: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first programs take S, the others z."""
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    Z_BLOCKS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    if program < rows * BLOCKS:
        row = (program // BLOCKS).to(tl.int64)
        column = program % BLOCKS * COLUMNS
        at = row * WIDTH
        _scan_block(
            S + at * chunks, first_S + at, end_S + at, column, chunks, HAS_FIRST_S, REVERSE, WIDTH, CHUNKS, COLUMNS
        )
    else:
        program -= rows * BLOCKS
        row = (program // Z_BLOCKS).to(tl.int64)
        column = program % Z_BLOCKS * COLUMNS
        at = row * F
        _scan_block(z + at * chunks, first_z + at, end_z + at, column, chunks, HAS_FIRST_Z, REVERSE, F, CHUNKS, COLUMNS)

"""Which tokens a sparse cache retains, for many blocks in one launch; the function of `sparse_chunked.choose`.

The candidates of block n are the tokens in the C slots and the L that leave the window when the block begins; the C of
the highest scores are retained, the others evicted. A key scores |whiten (k - mean)|^2. A program takes one sequence
and key/value head, and its blocks one after another: scores of the candidates, their ranks by counting, slots. In
memory it keeps the scores of one block, and the tokens in the slots before and after every block.
Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.launch import next_power_of_2
from lolcats.ops.hybrid_attention.kernels.shape import padded
from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_rows, load_vector

# At least as many entries as a program has threads: a scan over fewer would hold copies.
LEAST_CANDIDATES = 128


@torch.library.custom_op("lolcats::sparse_choice", mutates_args=())
def choose_op(k: Tensor, mean: Tensor, whiten: Tensor, exists: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `sparse_chunked.choose`.

    Args:
        k: [B, G, M, D] float32, keys of the candidates. Of those that do not exist, nothing is read.
        mean, whiten: [B, G, N, D] and [B, G, N, D, D], float32: a key scores |whiten (k - mean)|^2.
        exists: [B, N, J] bool.
    """
    batch, kv_heads, _, head_dim = k.shape
    blocks, candidates = exists.shape[1:]
    retained, evicted, folds = _outputs(k, exists, slots)
    retained[:, :, 0] = torch.arange(slots, device=k.device)
    wide = padded(head_dim) > 64
    columns = max(next_power_of_2(candidates), LEAST_CANDIDATES)
    choice_kernel[(batch * kv_heads,)](
        k.contiguous(),
        mean.contiguous(),
        whiten.contiguous(),
        exists.contiguous(),
        torch.empty(batch * kv_heads, candidates, dtype=torch.float32, device=k.device),
        retained,
        evicted,
        folds,
        blocks,
        kv_heads,
        D=head_dim,
        C=slots,
        L=candidates - slots,
        DB=padded(head_dim),
        EB=32 if wide else padded(head_dim),
        JT=32 if wide else 64,
        JB=columns,
        JC=min(8192 // columns, 32),
        num_warps=4,
        num_stages=1,  # loads ahead of time would overtake the stores of the block before
    )
    return retained[:, :, 1:], evicted, folds


@choose_op.register_fake
def _(k, mean, whiten, exists, slots):
    retained, evicted, folds = _outputs(k, exists, slots)
    return retained[:, :, 1:], evicted, folds


def _outputs(k: Tensor, exists: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in the slots before and after each block, and those that are evicted."""
    (batch, kv_heads), (_, blocks, candidates) = k.shape[:2], exists.shape
    retained = torch.empty(batch, kv_heads, blocks + 1, slots, dtype=torch.int64, device=k.device)
    evicted = torch.empty(batch, kv_heads, blocks, candidates - slots, dtype=torch.int64, device=k.device)
    return retained, evicted, torch.empty_like(evicted, dtype=torch.bool)


@triton.jit
def _candidates(slots, j, n, C: tl.constexpr, L: tl.constexpr):
    """Numbers of the candidates `j` of block n."""
    in_slot = tl.load(slots + j, mask=j < C, other=0)
    return tl.where(j < C, in_slot, (n * L + j).to(tl.int64))


@triton.jit
def _leverage(k, mean, whiten, index_J, there_J, D: tl.constexpr, DB: tl.constexpr, EB: tl.constexpr):
    """Scores [J] of candidates; -inf for those that do not exist."""
    d = tl.arange(0, DB)
    k_JD = tl.load(k + index_J[:, None] * D + d[None, :], mask=there_J[:, None] & (d < D)[None, :], other=0.0)
    deviation_JD = k_JD - load_vector(mean, D, DB)[None, :]
    score_J = tl.zeros([index_J.shape[0]], tl.float32)
    for first in tl.range(0, D, EB):
        whiten_ED = load_rows(whiten, first, D, D, 0, D, EB, DB)
        white_JE = dot(deviation_JD, tl.trans(whiten_ED))
        score_J += tl.sum(white_JE * white_JE, 1)
    score_J = tl.where(score_J == score_J, score_J, float("inf"))  # NaN: an order all the same
    return tl.where(there_J, score_J, float("-inf"))


@triton.jit
def _rank(score_J, score, j, J: tl.constexpr, JC: tl.constexpr):
    """How many candidates come before each: those of higher score, and of equal score the older ones."""
    rank_J = tl.zeros([j.shape[0]], tl.int32)
    for first in tl.range(0, J, JC):
        i = first + tl.arange(0, JC)
        other_I = tl.load(score + i, mask=i < J, other=float("-inf"))
        equal_JI = (other_I[None, :] == score_J[:, None]) & (i[None, :] < j[:, None])
        rank_J += tl.sum(((other_I[None, :] > score_J[:, None]) | equal_JI).to(tl.int32), 1)
    return rank_J


@triton.jit(do_not_specialize=["blocks", "kv_heads"])
def choice_kernel(
    k,
    mean,
    whiten,
    exists,
    score,  # [B G, J] of memory for the scores of one block
    retained,
    evicted,
    folds,
    blocks,
    kv_heads,
    D: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    DB: tl.constexpr,
    EB: tl.constexpr,  # rows of a tile of the whitening matrix
    JT: tl.constexpr,  # candidates scored at once
    JB: tl.constexpr,  # all of them
    JC: tl.constexpr,  # those with which all are compared at once
):
    """One program: all choices of one sequence and key/value head."""
    J: tl.constexpr = C + L
    row = tl.program_id(0).to(tl.int64)
    k += row * (C + blocks * L) * D
    mean += row * blocks * D
    whiten += row * blocks * D * D
    exists += row // kv_heads * blocks * J
    score += row * J
    retained += row * (blocks + 1) * C
    evicted += row * blocks * L
    folds += row * blocks * L
    j = tl.arange(0, JB)
    for n in tl.range(0, blocks):
        for first in tl.range(0, J, JT):
            tile = first + tl.arange(0, JT)
            there_T = tl.load(exists + tile, mask=tile < J, other=0) != 0
            index_T = _candidates(retained, tile, n, C, L)
            score_T = _leverage(k, mean, whiten, index_T, there_T, D, DB, EB)
            tl.store(score + tile, score_T, mask=tile < J)
        tl.debug_barrier()  # scores are read by other threads next

        score_J = tl.load(score + j, mask=j < J, other=float("-inf"))
        rank_J = _rank(score_J, score, j, J, JC)
        there_J = tl.load(exists + j, mask=j < J, other=0) != 0
        index_J = _candidates(retained, j, n, C, L)
        stays_J = (j < J) & (rank_J < C)
        # By age; who does not exist comes after all that do, in rank and slot alike.
        place_J = tl.where(there_J, tl.cumsum((stays_J & there_J).to(tl.int32), 0) - 1, rank_J)
        retained += C
        tl.store(retained + place_J, index_J, mask=stays_J)
        leaves_J = (j < J) & (rank_J >= C)
        tl.store(evicted + rank_J - C, index_J, mask=leaves_J)
        tl.store(folds + rank_J - C, there_J, mask=leaves_J)
        mean += D
        whiten += D * D
        exists += J
        evicted += L
        folds += L
        tl.debug_barrier()  # slots are read by other threads next

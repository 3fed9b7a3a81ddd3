"""Who keeps a slot of a sparse cache, block after block: what no block can know before the ones before it chose.

Only indices and scores go from block to block, and there is nothing to differentiate. Candidates are numbered: the
slots of the cache as it comes in, then the tokens that leave, block after block. Shape suffixes are those of
`sparse_chunked`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lolcats.ops.hybrid_attention.kernels.support import supports_choice
from lolcats.ops.hybrid_attention.sparse_cache import compete, covariance_factor, pick, recall_error


class Leverage:
    """Scores by `sparse_cache`'s leverage, with the moments of block n."""

    def __init__(self, k_BGMD: Tensor, mean_BGND: Tensor, scatter_BGNDD: Tensor, count_BN: Tensor) -> None:
        self.k_BGMD, self.mean_BGND, self.groups = k_BGMD, mean_BGND, k_BGMD.shape[1]
        factor_BGNDD = covariance_factor(scatter_BGNDD, count_BN[:, None])
        identity_DD = torch.eye(k_BGMD.shape[3], dtype=k_BGMD.dtype, device=k_BGMD.device)
        self.whiten_BGNDD = torch.linalg.solve_triangular(factor_BGNDD, identity_DD, upper=False)

    def score(self, n: int, index_BGJ: Tensor) -> Tensor:
        """[B, G, J]"""
        deviation_BGJD = pick(self.k_BGMD, index_BGJ) - self.mean_BGND[:, :, n, None]
        return (deviation_BGJD @ self.whiten_BGNDD[:, :, n].mT).square().sum(-1)

    def fold(self, gone_BGL: Tensor, folds_BGL: Tensor) -> None:
        """Nothing: who keeps a slot does not matter to the moments."""


class Recall:
    """Scores by the error of recall, with the sums before block n."""

    def __init__(self, phi_BSMF: Tensor, v_BSMD: Tensor, S: Tensor, z: Tensor, groups: int) -> None:
        self.phi_BSMF, self.v_BSMD, self.S, self.z, self.groups = phi_BSMF, v_BSMD, S, z, groups

    def score(self, n: int, index_BGJ: Tensor) -> Tensor:
        """[B, G, J]"""
        return recall_error(pick(self.phi_BSMF, index_BGJ), pick(self.v_BSMD, index_BGJ), self.S, self.z, self.groups)

    def fold(self, gone_BGL: Tensor, folds_BGL: Tensor) -> None:
        """Those who lost enter the sums."""
        folds_BSL = folds_BGL.repeat_interleave(self.S.shape[1] // self.groups, 1)
        phi_BSLF = pick(self.phi_BSMF, gone_BGL) * folds_BSL[..., None]
        self.S = self.S + phi_BSLF.mT @ pick(self.v_BSMD, gone_BGL)
        self.z = self.z + phi_BSLF.sum(-2)


@torch.no_grad()
def choose(
    exists_BNJ: Tensor, slots: int, scores: Leverage | Recall, *, use_kernel: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates in the slots [B, G, N, C], those who lost the competition [B, G, N, L], and which of these exist.

    Args:
        exists_BNJ: bool, the slots that are filled, and the tokens that leave, when block n begins.
        slots: C.
        use_kernel: choose in a Triton kernel where `support.supports_choice` has nothing against it.
    """
    if use_kernel and isinstance(scores, Leverage) and supports_choice(scores.k_BGMD, exists_BNJ.shape[2]) is None:
        from lolcats.ops.hybrid_attention.kernels.eviction import choose_op  # imports Triton

        return choose_op(scores.k_BGMD, scores.mean_BGND, scores.whiten_BGNDD, exists_BNJ, slots)
    batch, blocks, total = exists_BNJ.shape
    index_M = torch.arange(slots + blocks * (total - slots), device=exists_BNJ.device)
    slots_BGC = index_M[:slots].expand(batch, scores.groups, -1)
    chosen = []
    for n, new_L in enumerate(index_M[slots:].view(blocks, -1)):
        index_BGJ = torch.cat([slots_BGC, new_L.expand(batch, scores.groups, -1)], dim=2)
        kept_BGC, gone_BGL, folds_BGL = compete(scores.score(n, index_BGJ), exists_BNJ[:, n], slots)
        slots_BGC, gone_BGL = index_BGJ.gather(2, kept_BGC), index_BGJ.gather(2, gone_BGL)
        scores.fold(gone_BGL, folds_BGL)
        chosen.append((slots_BGC, gone_BGL, folds_BGL))
    slots_BGNC, gone_BGNL, folds_BGNL = (torch.stack(each, dim=2) for each in zip(*chosen, strict=True))
    return slots_BGNC, gone_BGNL, folds_BGNL

"""Linear attention that forgets, and GroupNorm in place of the denominator: the attention of SUPRA.

    y_n = norm( phi_q(q_n) . S_n ),    S_n = sum over j <= n of decay^(n - j) phi_k(k_j) v_j^T

with a fixed decay per state head, and norm either the division by phi_q(q_n) . z_n, z_n the same sum without
values, or GroupNorm over a head's dimensions, without learned scale. (arXiv:2405.06640, after RetNet,
arXiv:2307.08621.) A baseline in plain PyTorch: there is no window, and no kernel.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.equation import key_features, query_features, quotient, repeat_heads
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState, accumulation_dtype

CHUNK_TOKENS = 64
NORM_EPS = 1e-6


def decays(config: AttentionConfig, state_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[S] factors per token: 1 - 2^-5 to 1 - 2^-12, as RetNet's for 8 heads; 1 without decay."""
    exponent = torch.linspace(5.0, 12.0, state_heads, device=device, dtype=dtype)
    return 1.0 - torch.exp2(-exponent) if config.decay else torch.ones_like(exponent)


def retention(
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
    chunk: int = CHUNK_TOKENS,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`; token t of sequence b is real iff t < length_B[b] (None: all are).

    `scale`, `softcap`, `fresh` and `need_state` are what other implementations take; they change nothing here.

    Args:
        chunk: tokens taken at once; the result is the same.
    """
    tokens, heads = q_BHTD.shape[2], q_BHTD.shape[1]
    if tokens == 0:
        return q_BHTD, state
    if length_B is None:
        length_B = torch.full_like(state.position, tokens)
    dtype = accumulation_dtype(q_BHTD.dtype)
    real_BT = torch.arange(tokens, device=q_BHTD.device) < length_B[:, None]
    phi_k_BSTF = key_features(k_BGTD.to(dtype), config, params) * real_BT[:, None, :, None]
    state_heads = phi_k_BSTF.shape[1]
    phi_q_BSRTF = query_features(q_BHTD.to(dtype), config, params).unflatten(1, (state_heads, -1))
    v_BSTD = repeat_heads(v_BGTD.to(dtype), state_heads)

    log_S = decays(config, state_heads, q_BHTD.device, dtype).log()
    S, z = state.S, state.z
    outputs = []
    for begin in range(0, tokens, chunk):
        part = slice(begin, begin + chunk)
        phi_q, phi_k, v = phi_q_BSRTF[:, :, :, part], phi_k_BSTF[:, :, part], v_BSTD[:, :, part]
        step_L = torch.arange(phi_k.shape[2], device=q_BHTD.device)
        ago_LL = step_L[:, None] - step_L
        kept_SLL = (log_S[:, None, None] * ago_LL.clamp_min(0)).exp().masked_fill(ago_LL < 0, 0.0)
        weight_BSRLL = phi_q @ phi_k[:, :, None].mT * kept_SLL[:, None]
        since_S1L1 = (log_S[:, None, None, None] * (step_L[:, None] + 1)).exp()
        y_BSRLD = weight_BSRLL @ v[:, :, None] + since_S1L1 * (phi_q @ S[:, :, None])
        if config.normalizer == "group_norm":
            y_BSRLD = layer_norm(y_BSRLD, y_BSRLD.shape[-1:], eps=NORM_EPS)
        else:
            mass = weight_BSRLL.sum(-1, keepdim=True) + since_S1L1 * (phi_q @ z[:, :, None, :, None])
            y_BSRLD = quotient(y_BSRLD, mass)
        outputs.append(y_BSRLD)
        # What a sequence has at the end of its own tokens in this chunk; further ones do not exist.
        count_B = (length_B - begin).clamp(0, len(step_L))
        left_BL = (count_B[:, None] - 1 - step_L).clamp_min(0)
        phi_k = phi_k * (log_S[:, None] * left_BL[:, None]).exp()[..., None]
        kept_BS = (log_S * count_B[:, None]).exp()
        S = kept_BS[..., None, None] * S + phi_k.mT @ v
        z = kept_BS[..., None] * z + phi_k.sum(2)
    y_BHTD = torch.cat(outputs, dim=3).flatten(1, 2)
    assert y_BHTD.shape[1] == heads
    after = replace(state, S=S, z=z, position=state.position + length_B)
    return y_BHTD.masked_fill(~real_BT[:, None, :, None], 0.0).to(q_BHTD.dtype), after

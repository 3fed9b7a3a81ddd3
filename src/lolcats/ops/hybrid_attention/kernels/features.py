"""Feature maps inside the kernels, and their gradients.

A feature map with two signs is kept as two halves [., P]; they are joined only in memory, where states are
[F, D] with F = P or 2 P.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.kernels.tiles import dot, load_vector


@triton.jit
def project(x_MD, weight_DP, bias, head, P: tl.constexpr, PB: tl.constexpr, HAS_BIAS: tl.constexpr):
    """x W + b in float32: [M, P]."""
    projected_MP = dot(x_MD, weight_DP)
    if HAS_BIAS:
        projected_MP += load_vector(bias + head * P, P, PB).to(tl.float32)[None, :]
    return projected_MP


@triton.jit
def half_features(u_MP, MAP: tl.constexpr, P: tl.constexpr):
    """One half of the features in float32, zero in the padding: the first of u = x, the second of u = -x."""
    real = (tl.arange(0, u_MP.shape[1]) < P)[None, :]
    if (MAP == "hedgehog") or (MAP == "exp"):
        if u_MP.shape[1] > P:
            u_MP = tl.where(real, u_MP, float("-inf"))
        half = tl.exp(u_MP - tl.max(u_MP, 1)[:, None])
        if MAP == "hedgehog":
            half = half * (1.0 / tl.sum(half, 1))[:, None]
        return half
    elif MAP == "elu":
        half = tl.where(u_MP > 0, u_MP + 1.0, tl.exp(tl.minimum(u_MP, 0.0)))
        return tl.where(real, half, 0.0)
    else:
        return tl.maximum(u_MP, 0.0)  # t2r; the padding is zero already


@triton.jit
def features(x_MP, MAP: tl.constexpr, P: tl.constexpr):
    """Both halves of the features; maps without a second half repeat the first."""
    plus = half_features(x_MP, MAP, P)
    if (MAP == "hedgehog") or (MAP == "exp"):
        return plus, half_features(-x_MP, MAP, P)
    return plus, plus


@triton.jit
def half_gradient(u_MP, half, d_half, MAP: tl.constexpr, P: tl.constexpr):
    """Gradient of u [M, P] from that of its half of the features."""
    if MAP == "hedgehog":
        return half * (d_half - tl.sum(half * d_half, 1)[:, None])
    elif MAP == "exp":
        # exp(u - max u): the subgradient at the maximum (ties share it) takes the whole inner product
        is_top = ((half == 1.0) & (tl.arange(0, u_MP.shape[1]) < P)[None, :]).to(tl.float32)
        share = tl.sum(half * d_half, 1) / tl.maximum(tl.sum(is_top, 1), 1.0)  # masked rows have none
        return half * d_half - is_top * share[:, None]
    elif MAP == "elu":
        return tl.where(u_MP > 0, d_half, d_half * half)
    else:
        return tl.where(u_MP > 0, d_half, 0.0)

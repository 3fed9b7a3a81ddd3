"""The equation as loops over single numbers, written from the paper and from nothing else.

arXiv:2410.10254, equation hybrid_linear_swa; the sets W (softmax) and O (linear) by their definitions.
"""

from __future__ import annotations

import math

import torch
from hybrid_cases import Case
from torch import Tensor

from lolcats.config.attention import AttentionConfig


def in_softmax_part(spec: AttentionConfig, query: int, key: int) -> bool:
    """Whether the key at position `key` <= `query` has a softmax weight."""
    if key < spec.sinks:
        return True
    if spec.window_size == 0:
        return False
    if spec.window == "sliding":
        return query - key < spec.window_size
    return query // spec.window_size - key // spec.window_size < spec.window_blocks


def features(name: str, x_D: list[float], weight_DP: list[list[float]], bias_P: list[float] | None) -> list[float]:
    """phi(x) for one token of one head."""
    columns = len(weight_DP[0])
    y = [sum(x * row[p] for x, row in zip(x_D, weight_DP, strict=True)) for p in range(columns)]
    if bias_P is not None:
        y = [a + b for a, b in zip(y, bias_P, strict=True)]
    if name == "t2r":
        return [max(a, 0.0) for a in y]
    if name == "elu":
        return [1.0 + (a if a > 0 else math.exp(a) - 1.0) for a in y]
    assert name == "hedgehog"
    plus, minus = [math.exp(a) for a in y], [math.exp(-a) for a in y]
    return [a / sum(plus) for a in plus] + [a / sum(minus) for a in minus]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def loop_attention(case: Case, *, scale: float | None = None, softcap: float | None = None):
    """y [B, H, T, D], S [B, S, F, D] and z [B, S, F] in float64 (S and z None without a linear part)."""
    spec, params = case.spec, case.params
    batch, heads, tokens, dim = case.q.shape
    scale = scale or 1.0 / math.sqrt(dim)
    q, k, v = (tensor.tolist() for tensor in (case.q, case.k, case.v))
    gamma = params.gamma.tolist()
    sink_logits = None if params.sink_logits is None else params.sink_logits.tolist()
    state_heads = 0 if params.k_weight is None else params.k_weight.shape[0]
    phi_q = _all_features(spec, q, range(heads), heads, params.q_weight, params.q_bias)
    phi_k = _all_features(spec, k, range(state_heads), state_heads, params.k_weight, params.k_bias)

    kv_heads = case.k.shape[1]
    y = torch.zeros(batch, heads, tokens, dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            for n in range(tokens):
                seen = [j for j in range(n + 1) if in_softmax_part(spec, n, j)]
                score = {j: dot(q[b][h][n], k[b][g][j]) * scale for j in seen}
                if softcap is not None:
                    score = {j: softcap * math.tanh(s / softcap) for j, s in score.items()}
                rivals = list(score.values())
                if sink_logits is not None:
                    rivals.append(sink_logits[h])
                weight = {j: gamma[h] * math.exp(s - max(rivals)) for j, s in score.items()}
                denominator = sum(weight.values())
                if sink_logits is not None and score:
                    denominator += gamma[h] * math.exp(sink_logits[h] - max(rivals))
                if spec.feature_map is not None:
                    s = h * state_heads // heads
                    for j in range(n + 1):
                        if j not in score:
                            weight[j] = dot(phi_q[b][h][n], phi_k[b][s][j])
                            if spec.linear_length_cap:
                                weight[j] *= min(1.0, spec.linear_length_cap / (n + 1))
                            denominator += weight[j]
                mean = [sum(w * v[b][g][j][i] for j, w in weight.items()) for i in range(dim)]
                y[b, h, n] = torch.tensor([x / max(denominator, 1e-12) for x in mean], dtype=torch.float64)
    if spec.feature_map is None:
        return y, None, None

    size = len(phi_k[0][0][0])
    S = torch.zeros(batch, state_heads, size, dim, dtype=torch.float64)
    z = torch.zeros(batch, state_heads, size, dtype=torch.float64)
    for b in range(batch):
        for s in range(state_heads):
            for j in range(tokens):
                if not in_softmax_part(spec, tokens - 1, j):
                    phi = torch.tensor(phi_k[b][s][j], dtype=torch.float64)
                    S[b, s] += phi[:, None] * case.v[b, s * kv_heads // state_heads, j].double()
                    z[b, s] += phi
    return y, S, z


def _all_features(spec: AttentionConfig, x, heads, count: int, weight: Tensor | None, bias: Tensor | None):
    """Features [B][head][T][F]; several of `count` heads may read one head of x."""
    if spec.feature_map is None or weight is None:
        return None
    weights = weight.tolist()
    biases = None if bias is None else bias.tolist()
    return [
        [
            [
                features(spec.feature_map, token, weights[h], None if biases is None else biases[h])
                for token in row[h * len(row) // count]
            ]
            for h in heads
        ]
        for row in x
    ]

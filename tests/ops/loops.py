"""The equation as loops over single numbers, written from the paper and from nothing else.

arXiv:2410.10254, equation hybrid_linear_swa; the sets W (softmax) and O (linear) by their definitions.
"""

from __future__ import annotations

import math

import torch
from kit import Case
from torch import Tensor

from lolcats.config.attention import AttentionConfig


def in_softmax_part(config: AttentionConfig, query: int, key: int) -> bool:
    """Whether the key at position `key` <= `query` has a softmax weight."""
    if key < config.sinks:
        return True
    if config.window_size == 0:
        return False
    if config.window == "sliding":
        return query - key < config.window_size
    return query // config.window_size - key // config.window_size < config.window_blocks


def features(name: str, x_D: list[float], weight_DP: list[list[float]], bias_P: list[float] | None) -> list[float]:
    """phi(x) for one token of one head."""
    y = [sum(x * row[p] for x, row in zip(x_D, weight_DP, strict=True)) for p in range(len(weight_DP[0]))]
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
    """y [H, T, D], S [S, F, D] and z [S, F] in float64 of the first row (S and z None without a linear part)."""
    config, params = case.config, case.params
    _, heads, tokens, dim = case.q.shape
    kv_heads, linear = case.k.shape[1], config.feature_map is not None
    scale = scale or 1.0 / math.sqrt(dim)
    q, k, v = (x[0].tolist() for x in (case.q, case.k, case.v))
    gamma = params.gamma.tolist()
    sink_logits = None if params.sink_logits is None else params.sink_logits.tolist()
    state_heads = params.k_weight.shape[0] if linear else 0

    def all_features(x: list, count: int, weight: Tensor, bias: Tensor | None) -> list:
        """[head][T][F]; several of `count` heads may read one head of x."""
        biases = [None] * count if bias is None else bias.tolist()
        inputs = [x[h * len(x) // count] for h in range(count)]
        return [
            [features(config.feature_map, token, w, b) for token in row]
            for row, w, b in zip(inputs, weight.tolist(), biases, strict=True)
        ]

    if linear:
        phi_q = all_features(q, heads, params.q_weight, params.q_bias)
        phi_k = all_features(k, state_heads, params.k_weight, params.k_bias)
    y = torch.zeros(heads, tokens, dim, dtype=torch.float64)
    for h in range(heads):
        g, s = h * kv_heads // heads, h * state_heads // heads
        for n in range(tokens):
            seen = [j for j in range(n + 1) if in_softmax_part(config, n, j)]
            score = {j: dot(q[h][n], k[g][j]) * scale for j in seen}
            if softcap is not None:
                score = {j: softcap * math.tanh(x / softcap) for j, x in score.items()}
            rivals = list(score.values()) + ([] if sink_logits is None else [sink_logits[h]])
            weight = {j: gamma[h] * math.exp(x - max(rivals)) for j, x in score.items()}
            denominator = sum(weight.values())
            if sink_logits is not None and score:
                denominator += gamma[h] * math.exp(sink_logits[h] - max(rivals))
            for j in set(range(n + 1)) - set(score) if linear else ():
                weight[j] = dot(phi_q[h][n], phi_k[s][j])
                if config.linear_length_cap:
                    weight[j] *= min(1.0, config.linear_length_cap / (n + 1))
                denominator += weight[j]
            mean = [sum(w * v[g][j][i] for j, w in weight.items()) for i in range(dim)]
            y[h, n] = torch.tensor([x / max(denominator, 1e-12) for x in mean], dtype=torch.float64)
    if not linear:
        return y, None, None
    size = len(phi_k[0][0])
    S, z = torch.zeros(state_heads, size, dim).double(), torch.zeros(state_heads, size).double()
    for s in range(state_heads):
        for j in range(tokens):
            if not in_softmax_part(config, tokens - 1, j):
                phi = torch.tensor(phi_k[s][j], dtype=torch.float64)
                S[s] += phi[:, None] * case.v[0, s * kv_heads // state_heads, j].double().cpu()
                z[s] += phi
    return y, S, z

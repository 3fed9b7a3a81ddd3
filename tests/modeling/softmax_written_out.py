"""Softmax attention written out over positions: what every path must equal."""

import math

import torch


def written_out(q, k, v, *, window, sinks, cu_seqlens=None, scale=None, softcap=None, sink_logits=None):
    """A query at position t of its sequence sees the keys j <= t with j > t - window or j < sinks."""
    window, sinks = window or k.shape[2], sinks or 0
    batch, heads, tokens, _ = q.shape
    repeats = heads // k.shape[1]
    begins = [0] if cu_seqlens is None else cu_seqlens.tolist()
    y = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for t in range(tokens):
            first = max(begin for begin in begins if begin <= t)
            seen = [i for i in range(first, t + 1) if i > t - window or i - first < sinks]
            for h in range(heads):
                keys = k[b, h // repeats, seen].double()
                score = keys @ q[b, h, t].double() * (scale or 1 / math.sqrt(q.shape[3]))
                score = score if softcap is None else softcap * torch.tanh(score / softcap)
                if sink_logits is not None:
                    score = torch.cat([score, sink_logits[h : h + 1].double()])
                y[b, h, t] = score.softmax(0)[: len(seen)] @ v[b, h // repeats, seen].double()
    return y.to(q.dtype)

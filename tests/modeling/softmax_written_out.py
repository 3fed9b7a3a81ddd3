"""Softmax attention written out over positions: what every path must equal."""

import math

import torch


def positions(batch, tokens, mask=None, cu_seqlens=None):
    """[B, T] lists: each real token's place in its sequence; None: padding."""
    found = []
    for b in range(batch):
        row, count = [], 0
        for t in range(tokens):
            count = 0 if cu_seqlens is not None and b * tokens + t in cu_seqlens.tolist() else count
            real = mask is None or bool(mask[b, t])
            row.append(count if real else None)
            count += real
        found.append(row)
    return found


def written_out(q, k, v, *, window, sinks, mask=None, cu_seqlens=None, scale=None, softcap=None, sink_logits=None):
    """A query at position t of its sequence sees the keys j <= t with j > t - window or j < sinks."""
    window, sinks = window or k.shape[2], sinks or 0
    batch, heads, tokens, _ = q.shape
    repeats = heads // k.shape[1]
    place = positions(batch, tokens, mask, cu_seqlens)
    y = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(batch):
        row = place[b]
        for t in range(tokens):
            if row[t] is None:
                continue
            same = range(0 if cu_seqlens is None else t - row[t], t + 1)
            seen = [i for i in same if row[i] is not None and (row[i] > row[t] - window or row[i] < sinks)]
            for h in range(heads):
                keys = k[b, h // repeats, seen].double()
                score = keys @ q[b, h, t].double() * (scale or 1 / math.sqrt(q.shape[3]))
                score = score if softcap is None else softcap * torch.tanh(score / softcap)
                if sink_logits is not None:
                    score = torch.cat([score, sink_logits[h : h + 1].double()])
                y[b, h, t] = score.softmax(0)[: len(seen)] @ v[b, h // repeats, seen].double()
    return y.to(q.dtype)

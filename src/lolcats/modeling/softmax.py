"""Softmax attention as the original model computes it, for layers that keep it and for the teacher.

Shapes as in `lolcats.ops`: queries [B, H, T, D]; keys and values [B, G, K, D] with K >= T, aligned at the
end: query i stands at key K - T + i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import dropout as random_dropout
from torch.nn.functional import scaled_dot_product_attention

# Masked attention runs over blocks of queries, so that no T x T matrix is built.
QUERY_BLOCK = 1024


def softmax_attention(
    q_BHTD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    sliding_window: int | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal softmax attention; linear memory in T unless dropout, softcap or sinks need the weights.

    Args:
        scale: factor of the scores; 1 / sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        sink_logits: [H], an extra score without a value in every row (GPT-OSS).
        sliding_window: a query sees its own and the `sliding_window - 1` keys before it.
        mask: [B, K] bool, False for padding keys.
        segment_ids: [B, K] int; a query sees only keys of its own segment.
        dropout: probability of dropping an attention weight.

    Returns:
        [B, H, T, D]. Rows of padding queries are finite and mean nothing.
    """
    tokens, keys = q_BHTD.shape[2], k_BGKD.shape[2]
    groups = q_BHTD.shape[1] // k_BGKD.shape[1]
    if sliding_window is not None and sliding_window >= keys:
        sliding_window = None
    needs_scores = softcap is not None or sink_logits is not None
    needs_mask = mask is not None or segment_ids is not None or sliding_window is not None
    if not needs_scores and not needs_mask and tokens in (1, keys):
        return scaled_dot_product_attention(
            q_BHTD, k_BGKD, v_BGKD, dropout_p=dropout, is_causal=tokens > 1, scale=scale, enable_gqa=groups > 1
        )

    # With a mask, SDPA's fast kernels want the heads written out.
    k_BHKD, v_BHKD = k_BGKD.repeat_interleave(groups, 1), v_BGKD.repeat_interleave(groups, 1)
    position_K = torch.arange(keys, device=k_BGKD.device)
    outputs = []
    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        last = keys - tokens + end
        first = 0 if sliding_window is None else max(keys - tokens + begin - sliding_window + 1, 0)
        seen = slice(first, last)
        query_T1 = position_K[keys - tokens + begin : last, None]
        key_1K = position_K[None, seen]
        visible = key_1K <= query_T1
        if sliding_window is not None:
            visible = visible & (key_1K > query_T1 - sliding_window)
        visible = visible[None]
        if segment_ids is not None:
            segment_BT = segment_ids[:, keys - tokens + begin : last]
            visible = visible & (segment_BT[:, :, None] == segment_ids[:, None, seen])
        if mask is not None:
            # Every query sees itself, also padding: a row without any key would be NaN.
            visible = visible & (mask[:, None, seen] | (key_1K == query_T1))
        arguments = (q_BHTD[:, :, begin:end], k_BHKD[:, :, seen], v_BHKD[:, :, seen], visible[:, None])
        if needs_scores:
            outputs.append(_from_scores(*arguments, scale, softcap, sink_logits, dropout))
        else:
            q, k, v, visible = arguments
            outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout, scale=scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _from_scores(
    q_BHTD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    visible: Tensor,
    scale: float | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    dropout: float,
) -> Tensor:
    """The same with the scores written out; the softmax is float32 or wider."""
    scale = 1.0 / math.sqrt(q_BHTD.shape[-1]) if scale is None else scale
    score = q_BHTD @ k_BHKD.transpose(-1, -2) * scale
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~visible, -torch.inf)
    if sink_logits is not None:
        sink = sink_logits.to(score.dtype)[:, None, None].expand(*score.shape[:-1], 1)
        weight = torch.cat([score, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weight = score.softmax(-1)
    weight = random_dropout(weight, dropout, training=dropout > 0)
    return weight.to(v_BHKD.dtype) @ v_BHKD

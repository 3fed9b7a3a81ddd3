"""The choice of exact heads without gradients: scores from passes of the softmax model over retrieval texts.

For models whose gradients do not fit in memory, where gates (`head_gates.py`) cannot be learned. Each KV head has two:

    copy    attention from an answer's tokens, and from the token before each, to where the answer stands in the text
    reach   attention beyond the window and its sinks, times the relative change of the layer's output (before the
            output projection) if this head sees no further

Of three heads two are chosen by copying and one by reach.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lolcats.config.attention import AttentionConfig
from lolcats.data.retrieval import Sample
from lolcats.modeling.call import AttentionCall
from lolcats.ops.hybrid_attention.equation import quotient, scores, softmax_weights
from lolcats.training.head_gates import by_gate

SCORES = ("copy", "reach")
MAX_ROWS = 256
"""Queries of a text that are looked at: memory is that of so many rows of weights, and a text has hundreds of labels
only if it is a copy."""


def scoring_call(sample: Sample, found: dict[int, Tensor]) -> AttentionCall:
    """A softmax pass over a text [1, T] that adds the scores [2, G] of each linearized layer's KV heads to `found`."""

    def observe(
        module: Any,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y_softmax: Tensor,
        call: dict[str, Any],
    ) -> None:
        settings = {name: call[name] for name in ("scale", "softcap", "sink_logits", "sliding_window")}
        scores_2G = head_scores(q[0], k[0], v[0], sample, module.config, **settings)
        found[layer_idx] = scores_2G + found.get(layer_idx, 0.0)

    return AttentionCall(mode="softmax", observe=observe)


@torch.no_grad()
def head_scores(
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    sample: Sample,
    config: AttentionConfig,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """The `SCORES` [2, G] of one layer's KV heads in one text: means over query heads and the queries looked at.

    Args:
        config: its window and sinks are those beyond which exact heads see.
        Others as `lolcats.modeling.softmax.softmax_attention`.
    """
    groups, tokens, _ = k_GTD.shape
    position_T = torch.arange(tokens, device=q_HTD.device)
    answer_T, source_T = (torch.from_numpy(x).to(q_HTD.device) for x in (sample.answer, sample.source))
    predicted_T = pad(answer_T[1:], (0, 1), value=-1)
    row_R = ((answer_T >= 0) | (predicted_T >= 0)).nonzero()[:, 0]
    row_R = row_R[:: math.ceil(len(row_R) / MAX_ROWS)]
    row_R1 = row_R[:, None]
    is_source_RT = (source_T == answer_T[row_R1]) | (source_T == predicted_T[row_R1])
    is_source_RT &= source_T >= 0
    seen_RT = position_T <= row_R1
    if sliding_window is not None:
        seen_RT &= position_T > row_R1 - sliding_window
    beyond_RT = (position_T < config.window_start(row_R1)) & (position_T >= config.sinks)

    q_GXRD = q_HTD[:, row_R].unflatten(0, (groups, -1)).float()
    k_G1TD, v_G1TD = k_GTD[:, None].float(), v_GTD[:, None].float()
    sink_GX11 = None if sink_logits is None else sink_logits.float().view(groups, -1, 1, 1)
    score_GXRT = scores(q_GXRD, k_G1TD, scale, softcap)
    share, mass, total = softmax_weights(score_GXRT, seen_RT, sink_GX11)
    weight_GXRT = share * (mass / total)
    copy_G = (weight_GXRT * is_source_RT).sum(-1).mean((1, 2))
    far_GXRT = weight_GXRT * beyond_RT
    far_GXR1 = far_GXRT.sum(-1, keepdim=True)
    y_GXRD = weight_GXRT @ v_G1TD
    near_GXRD = quotient(y_GXRD - far_GXRT @ v_G1TD, 1.0 - far_GXR1)
    change_G = (y_GXRD - near_GXRD).square().sum((1, 2, 3)) / y_GXRD.square().sum()
    return torch.stack([copy_G, far_GXR1.mean((1, 2, 3)) * change_G.sqrt()])


def by_score(values: dict[str, dict[int, list[float]]]) -> list[tuple[int, int]]:
    """All heads as (layer, head): in turn the next two by copy score and the next one by reach, of those left.

    Args:
        values: of `SCORES`, by layer.
    """
    order = {name: iter(by_gate(values[name])) for name in SCORES}
    ranked: dict[tuple[int, int], None] = {}
    for name in itertools.cycle(("copy", "copy", "reach")):
        head = next((head for head in order[name] if head not in ranked), None)
        if head is None:
            break
        ranked[head] = None
    return list(ranked)

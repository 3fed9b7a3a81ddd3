"""Choosing the next token of each row, every row by its own parameters.

The order and meaning of the steps are those of transformers' logits processors: penalties, temperature,
top-k, top-p, min-p. The random number of a row comes from its request, so that a row's token does not depend on
the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lolcats.generation.params import SamplingParams
from lolcats.generation.penalties import Seen, column, penalise

# Top-p and min-p look at this many likeliest tokens first: sorting a whole vocabulary takes longer than a
# small model's forward pass, and the tokens sought are nearly always among these.
CANDIDATES = 512
# Columns per block in the search for a token: block sums in float64 cost little, those of all columns would
# take more memory than the logits.
BLOCK = 256


@dataclass(frozen=True)
class Chosen:
    """The tokens of a step.

    Attributes:
        tokens: one per row; -1 where the row's logits were not finite.
        logprobs: the token's log-probability, for rows that asked.
        top_logprobs: (token, log-probability) of the likeliest tokens, for rows that asked.
    """

    tokens: list[int]
    logprobs: list[float | None]
    top_logprobs: list[list[tuple[int, float]] | None]


def choose(logits_BV: Tensor, params: list[SamplingParams], uniforms: list[float], seen: Seen | None = None) -> Chosen:
    """One token per row.

    Args:
        logits_BV: the model's logits; not changed.
        params: of each row.
        uniforms: a random number in [0, 1) for each row; used where temperature is above 0.
        seen: tokens that occurred in the rows; needed where there are penalties.
    """
    device = logits_BV.device
    top_B, token_B = logits_BV.max(dim=-1)
    finite_B = top_B.isfinite()  # the maximum is NaN as soon as one logit is

    special = [row for row, item in enumerate(params) if item.temperature > 0 or item.penalties]
    if special:
        picked = [params[row] for row in special]
        row_N = torch.tensor(special, device=device)
        scores_NV = logits_BV[row_N].to(torch.promote_types(logits_BV.dtype, torch.float32))
        # A failed row must not raise; its token is not used.
        scores_NV = torch.where(finite_B[row_N, None], scores_NV, 0.0)
        if any(item.penalties for item in picked):
            assert seen is not None
            scores_NV = penalise(scores_NV, picked, seen[row_N])
        token_N = scores_NV.argmax(-1)
        for filters in (False, True):
            drawn = [row for row, item in enumerate(picked) if item.temperature > 0 and item.filters == filters]
            if drawn:
                index = torch.tensor(drawn, device=device)
                token_N[index] = _draw(
                    scores_NV[index], [picked[row] for row in drawn], [uniforms[special[row]] for row in drawn], filters
                )
        token_B[row_N] = token_N
    tokens = torch.where(finite_B, token_B, -1).tolist()
    return Chosen(tokens, *_logprobs(logits_BV, tokens, params))


def _draw(scores_NV: Tensor, params: list[SamplingParams], uniforms: list[float], filters: bool) -> Tensor:
    """[N] tokens sampled from rows that all filter, or all do not."""
    scores_NV = scores_NV / column([item.temperature for item in params], scores_NV)
    uniform_N = torch.tensor(uniforms, dtype=torch.float64, device=scores_NV.device)
    if not filters:
        return inverse_cdf(scores_NV.softmax(-1), uniform_N)
    ranked_NC, token_NC = keep_likely(scores_NV, params)
    return token_NC.gather(1, inverse_cdf(ranked_NC.softmax(-1), uniform_N)[:, None])[:, 0]


def keep_likely(scores_NV: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The tokens that top-k, top-p and min-p leave.

    Returns:
        scores [N, C], highest first, -inf where a token is left out, and the tokens [N, C].
    """
    vocabulary = scores_NV.shape[1]
    candidates = min(CANDIDATES, vocabulary)
    top_k = torch.tensor([item.top_k or vocabulary for item in params], device=scores_NV.device)[:, None]
    top_p = column([item.top_p for item in params], scores_NV)
    min_p = column([item.min_p for item in params], scores_NV)

    def leave_out(ranked: Tensor, total: Tensor) -> Tensor:
        """`total`: log of the sum over all tokens that top-k leaves."""
        rank = torch.arange(ranked.shape[1], device=ranked.device)
        share = (ranked - total).exp()
        before = share.cumsum(-1) - share  # probability of likelier tokens
        out = (rank >= top_k) | ((before >= top_p) & (top_p < 1.0)) | (share < min_p * share[:, :1])
        out[:, 0] = False
        return ranked.masked_fill(out, -torch.inf)

    if candidates < vocabulary:
        ranked_NC, token_NC = scores_NV.topk(candidates, dim=-1)
        within_k = ranked_NC.masked_fill(torch.arange(candidates, device=ranked_NC.device) >= top_k, -torch.inf)
        all_N1 = scores_NV.logsumexp(-1, keepdim=True)
        total_N1 = torch.where(top_k <= candidates, within_k.logsumexp(-1, keepdim=True), all_N1)
        left_NC = leave_out(ranked_NC, total_N1)
        if bool(((top_k <= candidates) | (left_NC[:, -1:] == -torch.inf)).all()):
            return left_NC, token_NC  # what comes after the candidates is left out too
    ranked_NV, token_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    within_k = ranked_NV.masked_fill(torch.arange(vocabulary, device=ranked_NV.device) >= top_k, -torch.inf)
    return leave_out(ranked_NV, within_k.logsumexp(-1, keepdim=True)), token_NV


def inverse_cdf(probability_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """[N] the first column at which the running sum of probabilities exceeds the row's random number."""
    rows, columns = probability_NV.shape
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(probability_NV, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    sum_NB = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target_N1 = uniform_N[:, None] * sum_NB[:, -1:]
    block_N1 = (sum_NB <= target_N1).sum(-1, keepdim=True).clamp_max(blocks - 1)
    before_N1 = torch.where(block_N1 > 0, sum_NB.gather(1, (block_N1 - 1).clamp_min(0)), 0.0)
    inside_NK = padded.gather(1, block_N1[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    passed_NK = inside_NK.cumsum(-1, dtype=torch.float64) + before_N1 > target_N1
    # Rounding can leave no column above the target: the block's likeliest is as good as any then.
    column_N = torch.where(passed_NK.any(-1), passed_NK.int().argmax(-1), inside_NK.argmax(-1))
    return block_N1[:, 0] * BLOCK + column_N


def _logprobs(
    logits_BV: Tensor, tokens: list[int], params: list[SamplingParams]
) -> tuple[list[float | None], list[list[tuple[int, float]] | None]]:
    chosen: list[float | None] = [None] * len(tokens)
    top: list[list[tuple[int, float]] | None] = [None] * len(tokens)
    asking = [row for row, item in enumerate(params) if item.logprobs is not None and tokens[row] >= 0]
    if not asking:
        return chosen, top
    row_N = torch.tensor(asking, device=logits_BV.device)
    token_N = torch.tensor([tokens[row] for row in asking], device=logits_BV.device)
    logits_NV = logits_BV[row_N]
    logprob_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)
    most = min(max(params[row].logprobs or 0 for row in asking), logits_BV.shape[1])
    value_NK, index_NK = logprob_NV.topk(most, dim=-1)
    picked = logprob_NV.gather(1, token_N[:, None])[:, 0].tolist()
    for row, logprob, values, indices in zip(asking, picked, value_NK.tolist(), index_NK.tolist(), strict=True):
        wanted = params[row].logprobs
        chosen[row], top[row] = logprob, list(zip(indices[:wanted], values[:wanted], strict=True))
    return chosen, top

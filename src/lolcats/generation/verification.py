"""Which drafted tokens stay: the likeliest ones for greedy rows, rejection sampling for the others.

Sources: arXiv:2211.17192, arXiv:2302.01318.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lolcats.generation.sampling import Chosen, SamplingParams, inverse_cdf, keep_likely, logprobs_of


def can_draft(params: SamplingParams) -> bool:
    """Whether a request's tokens can be checked several at a time: penalties make each depend on the one before."""
    return not params.penalties


def verify(
    logits_BTV: Tensor,
    drafted_BK: Tensor,
    draft_logits_BKV: Tensor | None,
    params: Sequence[SamplingParams],
    uniforms: Sequence[Sequence[float]],
    first: Chosen | None = None,
    limits: Sequence[int] | None = None,
) -> list[Chosen]:
    """The tokens of each row: the drafted ones up to the first that is rejected, and one more.

    Greedy rows get what they would without a draft, sampled ones tokens of the same distribution (arXiv:2211.17192).

    Args:
        logits_BTV: of the check, T = K + 1: before each drafted token, and after the last.
        drafted_BK: a sampled row's were drawn from softmax(draft logits / temperature).
        draft_logits_BKV: needed for sampled rows; None: no other tokens could have been drafted.
        uniforms: K + 1 random numbers of each sampled row.
        first: tokens of the rows that cannot draft, which get these alone.
        limits: logits that count in each row, at least one; what stands behind them means nothing. None: all.

    Returns:
        Of each row, at least one token; -1 ends those whose logits were not finite.
    """
    rows, steps = drafted_BK.shape
    top_BT, token_BT = logits_BTV.max(-1)
    accepted_BK = drafted_BK == token_BT[:, :steps]
    sampled = [row for row, item in enumerate(params) if item.temperature > 0 and can_draft(item)]
    if sampled:
        index_N = torch.tensor(sampled, device=drafted_BK.device)
        picked = [params[row] for row in sampled]
        uniform_NT = torch.tensor(
            [list(uniforms[row]) for row in sampled], dtype=torch.float64, device=drafted_BK.device
        )
        accepted_NK, last_NT = _sample(
            logits_BTV[index_N],
            drafted_BK[index_N],
            None if draft_logits_BKV is None else draft_logits_BKV[index_N],
            picked,
            uniform_NT,
        )
        accepted_BK[index_N], token_BT[index_N] = accepted_NK, last_NT
    count_B = accepted_BK.long().cumprod(1).sum(1)
    column_T = torch.arange(steps + 1, device=drafted_BK.device)
    padded_BT = torch.nn.functional.pad(drafted_BK, (0, 1))
    token_BT = torch.where(column_T < count_B[:, None], padded_BT, token_BT)
    token_BT = torch.where(top_BT.isfinite(), token_BT, -1)
    counts, tokens = count_B.tolist(), token_BT.tolist()
    answers: list[list[int]] = []
    for row in range(rows):
        found = tokens[row][: counts[row] + 1 if limits is None else min(counts[row] + 1, limits[row])]
        answers.append(found[: found.index(-1) + 1] if -1 in found else found)
    for row, item in enumerate(params):
        if not can_draft(item):
            assert first is not None
            answers[row] = [first.tokens[row]]
    place = [(row, column) for row, answer in enumerate(answers) for column in range(len(answer))]
    flat_NV = logits_BTV[:0, 0]
    if any(item.logprobs is not None for item in params):
        flat_NV = logits_BTV[[row for row, _ in place], [column for _, column in place]]
    tokens_N = [answers[row][column] for row, column in place]
    chosen, top = logprobs_of(flat_NV, tokens_N, [params[row] for row, _ in place])
    each = iter(zip(chosen, top, strict=True))
    results = []
    for answer in answers:
        found_logprobs = [next(each) for _ in answer]
        results.append(Chosen(answer, [one for one, _ in found_logprobs], [many for _, many in found_logprobs]))
    return results


def _sample(
    logits_NTV: Tensor,
    drafted_NK: Tensor,
    draft_logits_NKV: Tensor | None,
    params: list[SamplingParams],
    uniform_NT: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: which drafted tokens p / q accepts, and the token in the place of each, or after the last.

    It comes from what p has more than q, for a rejected token, and from p after the last.
    """
    rows, steps = drafted_NK.shape
    p_NTV = target_probabilities(logits_NTV, params)
    temperature_N11 = torch.tensor([item.temperature for item in params], device=p_NTV.device)[:, None, None]
    if draft_logits_NKV is None:
        q_NKV = torch.zeros_like(p_NTV[:, :steps]).scatter_(2, drafted_NK[..., None], 1.0)
    else:
        q_NKV = draft_probabilities(draft_logits_NKV, temperature_N11)
    p_NK, q_NK = (x[:, :steps].gather(2, drafted_NK[..., None])[..., 0] for x in (p_NTV, q_NKV))
    accepted_NK = uniform_NT[:, :steps] * q_NK < p_NK
    rest_NTV = p_NTV.clone()
    rest_NTV[:, :steps] = residual(p_NTV[:, :steps], q_NKV)
    # A number that accepted nothing is left over: the one after it decides which token takes the place.
    last_N = inverse_cdf(rest_NTV.flatten(0, 1), uniform_NT[:, -1:].expand(-1, steps + 1).flatten())
    return accepted_NK, last_N.view(rows, steps + 1)


def residual(p_NKV: Tensor, q_NKV: Tensor) -> Tensor:
    """What a distribution has more than the draft's; itself, where rounding leaves nothing."""
    rest_NKV = (p_NKV - q_NKV).clamp_min(0)
    return torch.where(rest_NKV.sum(-1, keepdim=True) > 0, rest_NKV, p_NKV)


def draft_probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """[..., V] of sampled rows; `temperature` broadcasts to the logits."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)


def target_probabilities(logits_NTV: Tensor, params: list[SamplingParams]) -> Tensor:
    """[N, T, V] of what `choose` samples from: after temperature, top-k, top-p and min-p."""
    rows, tokens, vocabulary = logits_NTV.shape
    each = [item for item in params for _ in range(tokens)]
    temperature_N1 = torch.tensor([item.temperature for item in each], device=logits_NTV.device)[:, None]
    scores_NV = logits_NTV.flatten(0, 1).to(torch.promote_types(logits_NTV.dtype, torch.float32)) / temperature_N1
    scores_NV = torch.where(
        scores_NV.max(-1, keepdim=True).values.isfinite(), scores_NV, 0.0
    )  # a failed row's are not used
    p_NV = scores_NV.softmax(-1)
    filtering = [row for row, item in enumerate(each) if item.filters]
    if filtering:
        index_F = torch.tensor(filtering, device=logits_NTV.device)
        ranked_FC, token_FC = keep_likely(scores_NV[index_F], [each[row] for row in filtering])
        p_NV[index_F] = torch.zeros_like(p_NV[index_F]).scatter_(1, token_FC, ranked_FC.softmax(-1))
    return p_NV.view(rows, tokens, vocabulary)

"""Sampling: what a request may ask for, and the choice of each row's next token by its own parameters.

The order and meaning of the steps are those of transformers' logits processors: penalties, temperature,
top-k, top-p, min-p. The random number of a row comes from its request, so that a row's token does not depend on
the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

MAX_LOGPROBS = 20
# Top-p and min-p look at this many likeliest tokens first: sorting a whole vocabulary takes longer than a
# small model's forward pass, and the tokens sought are nearly always among these.
CANDIDATES = 512
# Columns per block in the search for a token: block sums in float64 cost little, those of all columns would
# take more memory than the logits.
BLOCK = 256


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when they end. Bad values raise ValueError.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: sample from this many likeliest tokens; 0: from all.
        top_p: sample from the likeliest tokens that together have this share of probability.
        min_p: exclude tokens less likely than this times the likeliest one.
        repetition_penalty: tokens that occurred, in the prompt too, get logits divided by it where positive,
            multiplied where negative (arXiv:1909.05858); 1: none.
        presence_penalty: taken from the logits of tokens that occurred in the answer; -2 to 2.
        frequency_penalty: the same, times how often the token occurred in the answer; -2 to 2.
        stop: text that ends the answer, which stops right before it. One string or several.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
        ignore_eos: do not end at the model's own end tokens.
        seed: of this request's random numbers: the same seed gives the same tokens, whatever runs beside it.
            None: another one every time.
        logprobs: also return each token's log-probability under the model, before temperature and all other
            processing, and those of this many likeliest tokens (0 to 20). None: not at all.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if not isinstance(value, Sequence):
                raise ValueError(f"{name}={value!r}: expected a list")
            object.__setattr__(self, name, tuple(value))
        self._expect_int("max_new_tokens", 1)
        self._expect_int("top_k", 0)
        self._expect_number("temperature", 0.0, math.inf)
        self._expect_number("top_p", 0.0, 1.0, above=True)
        self._expect_number("min_p", 0.0, 1.0)
        self._expect_number("repetition_penalty", 0.0, math.inf, above=True)
        self._expect_number("presence_penalty", -2.0, 2.0)
        self._expect_number("frequency_penalty", -2.0, 2.0)
        if self.logprobs is not None:
            self._expect_int("logprobs", 0, MAX_LOGPROBS)
        if self.seed is not None:
            self._expect_int("seed", None)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: expected true or false")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={list(self.stop)!r}: expected texts of at least one character")
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={list(self.stop_token_ids)!r}: expected token ids, integers from 0")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """From JSON values.

        Raises:
            ValueError: an unknown name or a bad value.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(f"unknown parameter {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**values)

    @property
    def filters(self) -> bool:
        """Whether sampling excludes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalties(self) -> bool:
        """Whether tokens that occurred before count."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _expect_int(self, name: str, least: int | None, most: int | None = None) -> None:
        value = getattr(self, name)
        if _is_int(value) and (least is None or value >= least) and (most is None or value <= most):
            return
        wanted = "" if least is None else f" from {least}" + ("" if most is None else f" to {most}")
        raise ValueError(f"{name}={value!r}: expected an integer{wanted}")

    def _expect_number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if number and (low < value if above else low <= value) and value <= high:
            return
        bounds = f"{'above' if above else 'from'} {low:g}" + ("" if high == math.inf else f" to {high:g}")
        raise ValueError(f"{name}={value!r}: expected a number {bounds}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
        scores [N, C], highest first, -inf where a token is excluded, and the tokens [N, C].
    """
    vocabulary = scores_NV.shape[1]
    candidates = min(CANDIDATES, vocabulary)
    top_k = torch.tensor([item.top_k or vocabulary for item in params], device=scores_NV.device)[:, None]
    top_p = column([item.top_p for item in params], scores_NV)
    min_p = column([item.min_p for item in params], scores_NV)

    def exclude(ranked: Tensor, total: Tensor) -> Tensor:
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
        left_NC = exclude(ranked_NC, total_N1)
        if bool(((top_k <= candidates) | (left_NC[:, -1:] == -torch.inf)).all()):
            return left_NC, token_NC  # all after the candidates are excluded too
    ranked_NV, token_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    within_k = ranked_NV.masked_fill(torch.arange(vocabulary, device=ranked_NV.device) >= top_k, -torch.inf)
    return exclude(ranked_NV, within_k.logsumexp(-1, keepdim=True)), token_NV


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


@dataclass(frozen=True)
class Seen:
    """Which tokens occurred in some rows.

    Attributes:
        any_NV: bool, in the prompt or the answer.
        count_NV: int32, how often in the answer.
    """

    any_NV: Tensor
    count_NV: Tensor

    def __getitem__(self, row_N: Tensor) -> Seen:
        return Seen(self.any_NV[row_N], self.count_NV[row_N])


def penalise(scores_NV: Tensor, params: list[SamplingParams], seen: Seen) -> Tensor:
    """Scores after all penalties; see `SamplingParams` for their meaning.

    Sources: arXiv:1909.05858 (repetition); OpenAI's API reference (presence, frequency).
    """
    factor_N1 = column([item.repetition_penalty for item in params], scores_NV)
    divided_NV = torch.where(scores_NV < 0, scores_NV * factor_N1, scores_NV / factor_N1)
    scores_NV = torch.where(seen.any_NV, divided_NV, scores_NV)
    presence_N1 = column([item.presence_penalty for item in params], scores_NV)
    frequency_N1 = column([item.frequency_penalty for item in params], scores_NV)
    return scores_NV - presence_N1 * (seen.count_NV > 0) - frequency_N1 * seen.count_NV


def column(values: list[float], like: Tensor) -> Tensor:
    """[N, 1] of the type and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


class SeenTokens:
    """Which tokens occurred in each slot: [slots, V], made when first needed."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.seen: Seen | None = None

    def start(self, row: int, tokens: list[int], vocabulary: int) -> None:
        """A new request with the prompt `tokens`."""
        if self.seen is None:
            shape = (self.slots, vocabulary)
            self.seen = Seen(
                torch.zeros(shape, dtype=torch.bool, device=self.device),
                torch.zeros(shape, dtype=torch.int32, device=self.device),
            )
        self.seen.any_NV[row] = False
        self.seen.any_NV[row, torch.tensor(tokens, device=self.device)] = True
        self.seen.count_NV[row] = 0

    def add(self, rows: list[int], tokens: list[int]) -> None:
        """One generated token for each of some rows."""
        if self.seen is not None and rows:
            place = (torch.tensor(rows, device=self.device), torch.tensor(tokens, device=self.device))
            self.seen.any_NV[place] = True
            self.seen.count_NV[place] += 1

    def move(self, source: int, target: int) -> None:
        if self.seen is not None:
            for tensor_SV in (self.seen.any_NV, self.seen.count_NV):
                tensor_SV[target] = tensor_SV[source]

    def exchange(self, first: int, second: int) -> None:
        if self.seen is not None:
            for tensor_SV in (self.seen.any_NV, self.seen.count_NV):
                tensor_SV[[first, second]] = tensor_SV[[second, first]]

    def of(self, rows: list[int]) -> Seen | None:
        return None if self.seen is None else self.seen[torch.tensor(rows, device=self.device)]

"""Sampling: what a request may ask for, and the choice of each row's next token by its own parameters.

The order and meaning of the steps are those of transformers' logits processors: temperature, top-k, top-p, min-p.
The random number of a row comes from its request, so that a row's token does not depend on the rows next to it.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

MAX_LOGPROBS = 20
# Top-p and min-p look at this many likeliest tokens first: sorting a whole vocabulary takes longer than a
# small model's forward pass, and the tokens sought are nearly always among these.
CANDIDATES = 512
# Dividing logits by less overflows; vLLM draws the line here too.
MIN_TEMPERATURE = 1e-5

Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(lambda value: value * (value >= MIN_TEMPERATURE))]


def _as_tuple(most: int) -> BeforeValidator:
    def validate(value: Any) -> Any:
        value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if isinstance(value, tuple) and len(value) > most:  # pydantic would look at all of them first
            raise ValueError(f"expected at most {most}, got {len(value)}")
        return value

    return BeforeValidator(validate, json_schema_input_type=str | list[str] | list[int])


class CommonParams(BaseModel):
    """What requests of the engine and of OpenAI's protocol have in common.

    Attributes:
        temperature: 0 takes the likeliest token, as do values below 1e-5; otherwise logits are divided by it.
        top_k: sample from this many likeliest tokens; 0: from all.
        top_p: sample from the likeliest tokens that together have this share of probability.
        min_p: exclude tokens less likely than this times the likeliest one.
        stop: text that ends the answer, which stops right before it. One string or several.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
        ignore_eos: do not end at the model's own end tokens.
        seed: of this request's random numbers: the same seed gives the same tokens, whatever runs beside it.
            None: another one every time.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: Temperature = 0.0
    top_k: int = Field(0, ge=0, le=2**31 - 1)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    # OpenAI takes 4 stop strings, evaluations send more.
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=512)], ...], _as_tuple(16)] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...], _as_tuple(128)] = ()
    ignore_eos: bool = False
    seed: int | None = None


class SamplingParams(CommonParams):
    """How one request's tokens are chosen, when they end and what comes with them. Bad values raise ValueError.

    Attributes:
        max_new_tokens: most tokens to generate.
        logprobs: also return each token's log-probability under the model, before temperature and all other
            processing, and those of this many likeliest tokens (0 to 20). None: not at all.
        keep_state: put the state at the end into the result.
    """

    max_new_tokens: int = Field(128, ge=1, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    keep_state: bool = False

    def changed(self, **values: Any) -> SamplingParams:
        """With some other values, which are checked."""
        return SamplingParams(**(self.model_dump() | values))

    @property
    def filters(self) -> bool:
        """Whether sampling excludes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def choose(logits_BV: Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    """One token per row; -1 where the row's logits are not finite.

    Args:
        logits_BV: the model's logits; not changed.
        params: of each row.
        uniforms: a random number in [0, 1) for each row; used where temperature is above 0.
    """
    top_B, token_B = logits_BV.max(dim=-1)
    finite_B = top_B.isfinite()  # the maximum is NaN as soon as one logit is
    for filters in (False, True):
        drawn = [row for row, item in enumerate(params) if item.temperature > 0 and item.filters == filters]
        if not drawn:
            continue
        row_N, picked = torch.tensor(drawn, device=logits_BV.device), [params[row] for row in drawn]
        scores_NV = logits_BV[row_N].to(torch.promote_types(logits_BV.dtype, torch.float32))
        # A failed row must not raise; its token is not used.
        scores_NV = torch.where(finite_B[row_N, None], scores_NV, 0.0)
        scores_NV = scores_NV / _column([item.temperature for item in picked], scores_NV)
        own = [uniforms[row] for row in drawn]
        if filters:
            ranked_NC, token_NC = keep_likely(scores_NV, picked)
            token_B[row_N] = token_NC.gather(1, inverse_cdf(ranked_NC.softmax(-1), own)[:, None])[:, 0]
        else:
            token_B[row_N] = inverse_cdf(scores_NV.softmax(-1), own)
    return torch.where(finite_B, token_B, -1).tolist()


def keep_likely(scores_NV: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The tokens that top-k, top-p and min-p leave.

    Returns:
        scores [N, C], highest first, -inf where a token is excluded, and the tokens [N, C].
    """
    vocabulary = scores_NV.shape[1]
    top_k = torch.tensor([item.top_k or vocabulary for item in params], device=scores_NV.device)[:, None]
    top_p = _column([item.top_p for item in params], scores_NV)
    min_p = _column([item.min_p for item in params], scores_NV)
    count = min(CANDIDATES, vocabulary)
    while True:
        ranked_NC, token_NC = scores_NV.topk(count, dim=-1)
        rank_C = torch.arange(count, device=scores_NV.device)
        # Log of the sum over all tokens that top-k leaves.
        within_k = ranked_NC.masked_fill(rank_C >= top_k, -torch.inf).logsumexp(-1, keepdim=True)
        total_N1 = torch.where(top_k <= count, within_k, scores_NV.logsumexp(-1, keepdim=True))
        share_NC = (ranked_NC - total_N1).exp()
        before_NC = share_NC.cumsum(-1) - share_NC  # probability of likelier tokens
        out_NC = (rank_C >= top_k) | ((before_NC >= top_p) & (top_p < 1.0)) | (share_NC < min_p * share_NC[:, :1])
        out_NC[:, 0] = False
        if count == vocabulary or bool(((top_k <= count) | out_NC[:, -1:]).all()):
            return ranked_NC.masked_fill(out_NC, -torch.inf), token_NC  # all after these are excluded too
        count = vocabulary


def inverse_cdf(probability_NV: Tensor, uniforms: list[float]) -> Tensor:
    """[N] the first column at which the running sum of probabilities exceeds the row's random number."""
    dtype = torch.float32 if probability_NV.device.type == "mps" else torch.float64  # mps has no float64
    sum_NV = probability_NV.cumsum(-1, dtype=dtype)
    last_N1 = sum_NV[:, -1:].contiguous()
    found_N1 = torch.searchsorted(sum_NV, _column(uniforms, sum_NV) * last_N1, right=True)
    # Rounding can make a target the whole sum: no column is above it then, and the last possible one is taken.
    return torch.minimum(found_N1, torch.searchsorted(sum_NV, last_N1))[:, 0]


def logprobs_of(
    logits_BV: Tensor, tokens: list[int], params: list[SamplingParams]
) -> list[tuple[float, list[tuple[int, float]]] | None]:
    """Each row's log-probability of its token, and (token, log-probability) of the likeliest; None: not asked for."""
    found: list[tuple[float, list[tuple[int, float]]] | None] = [None] * len(tokens)
    asking = [row for row, item in enumerate(params) if item.logprobs is not None and tokens[row] >= 0]
    if not asking:
        return found
    token_N1 = torch.tensor([[tokens[row]] for row in asking], device=logits_BV.device)
    logits_NV = logits_BV[asking]
    logprob_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)
    value_NK, index_NK = logprob_NV.topk(min(MAX_LOGPROBS, logits_BV.shape[1]), dim=-1)
    picked = logprob_NV.gather(1, token_N1)[:, 0].tolist()
    for row, logprob, values, indices in zip(asking, picked, value_NK.tolist(), index_NK.tolist(), strict=True):
        found[row] = logprob, list(zip(indices, values, strict=True))[: params[row].logprobs]
    return found


def _column(values: list[float], like: Tensor) -> Tensor:
    """[N, 1] of the type and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

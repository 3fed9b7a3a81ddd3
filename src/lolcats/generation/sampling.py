"""Sampling: what a request may ask for, and the choice of each row's next token by its own parameters.

The order and meaning of the steps are those of transformers' logits processors: temperature, top-k, top-p, min-p.
The random number of a row comes from its request, so that a row's token does not depend on the rows next to it.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from lolcats.modeling.softmax import upload

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

    def model_copy(self, *, update: Any = None, deep: bool = False) -> SamplingParams:
        return self.changed(**(update or {}))  # pydantic's would keep `packed`

    @cached_property
    def packed(self) -> bytes:
        """Temperature, top_k, top_p, min_p: those of many rows are joined faster than they are looked up."""
        return struct.pack("4d", self.temperature, self.top_k, self.top_p, self.min_p)


def choose(logits_BV: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """One token per row; -1 where the row's logits are not finite. The host hardly ever waits for the device.

    Args:
        logits_BV: the model's logits; not changed.
        params: of each row.
        uniforms: a random number in [0, 1) for each row; used where temperature is above 0.
    """
    device = logits_BV.device
    precise = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    top_B, token_B = logits_BV.max(dim=-1)
    finite_B = top_B.isfinite()  # the maximum is NaN as soon as one logit is
    temperature_B, top_k_B, top_p_B, min_p_B = np.frombuffer(b"".join([x.packed for x in params])).reshape(-1, 4).T
    filters_B = (top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0)
    top_k_B = np.where(top_k_B, top_k_B, logits_BV.shape[1])
    given_5B = np.stack([temperature_B, top_k_B, top_p_B, min_p_B, uniforms])
    for filters in (False, True):
        drawn = np.flatnonzero((temperature_B > 0) & (filters_B == filters))
        if not len(drawn):
            continue
        row_N = slice(None) if len(drawn) == len(params) else upload(drawn, device)  # not copied if it is all
        given_5N1 = upload(given_5B[:, drawn, None], device, precise)
        scores_NV = logits_BV[row_N].to(torch.promote_types(logits_BV.dtype, torch.float32))
        # A failed row must not raise; its token is not used.
        scores_NV = torch.where(finite_B[row_N, None], scores_NV, 0.0)
        temperature_N1, limits_3N1 = given_5N1[:4].to(scores_NV.dtype).tensor_split([1])
        scores_NV = scores_NV / temperature_N1[0]
        if filters:
            ranked_NC, token_NC = keep_likely(scores_NV, limits_3N1, int(top_k_B[drawn].max()))
            token_B[row_N] = token_NC.gather(1, inverse_cdf(ranked_NC.softmax(-1), given_5N1[4]))[:, 0]
        else:
            token_B[row_N] = inverse_cdf(scores_NV.softmax(-1), given_5N1[4])[:, 0]
    return torch.where(finite_B, token_B, -1)


def keep_likely(scores_NV: Tensor, limits_3N1: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The tokens that top-k, top-p and min-p leave.

    Args:
        limits_3N1: the three of each row.
        most: the largest top-k.

    Returns:
        scores [N, C], highest first, -inf where a token is excluded, and the tokens [N, C].
    """
    vocabulary, (top_k, top_p, min_p) = scores_NV.shape[1], limits_3N1
    count = min(CANDIDATES, vocabulary)
    while True:
        ranked_NC, token_NC = scores_NV.topk(count, dim=-1)
        rank_C = torch.arange(count, device=scores_NV.device)
        # Log of the sum over all tokens that top-k leaves.
        total_N1 = ranked_NC.masked_fill(rank_C >= top_k, -torch.inf).logsumexp(-1, keepdim=True)
        if most > count:
            total_N1 = torch.where(top_k <= count, total_N1, scores_NV.logsumexp(-1, keepdim=True))
        share_NC = (ranked_NC - total_N1).exp()
        before_NC = share_NC.cumsum(-1) - share_NC  # probability of likelier tokens
        out_NC = (rank_C >= top_k) | ((before_NC >= top_p) & (top_p < 1.0)) | (share_NC < min_p * share_NC[:, :1])
        out_NC[:, 0] = False
        if count == vocabulary or most <= count or bool(((top_k <= count) | out_NC[:, -1:]).all()):
            return ranked_NC.masked_fill(out_NC, -torch.inf), token_NC  # all after these are excluded too
        count = vocabulary


def inverse_cdf(probability_NV: Tensor, uniform_N1: Tensor) -> Tensor:
    """[N, 1] the first column at which the running sum of probabilities exceeds the row's random number."""
    sum_NV = probability_NV.cumsum(-1, dtype=uniform_N1.dtype)
    last_N1 = sum_NV[:, -1:].contiguous()
    found_N1 = torch.searchsorted(sum_NV, uniform_N1 * last_N1, right=True)
    # Rounding can make a target the whole sum: no column is above it then, and the last possible one is taken.
    return torch.minimum(found_N1, torch.searchsorted(sum_NV, last_N1))


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

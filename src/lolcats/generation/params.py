"""What a request may ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when they end. Bad values raise ValueError.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: sample from this many likeliest tokens; 0: from all.
        top_p: sample from the likeliest tokens that together have this share of probability.
        min_p: leave out tokens less likely than this times the likeliest one.
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
        """Whether sampling leaves out tokens."""
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

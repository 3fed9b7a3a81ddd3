"""Penalties on tokens that occurred before, every row by its own parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lolcats.generation.params import SamplingParams


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

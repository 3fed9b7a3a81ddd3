"""Prompt lookup: the draft is what followed the latest tokens where they stood before; the model checks it.

A draft costs nothing, neither weights nor a pass. It is right where an answer repeats its context: summaries, edits,
code, questions about a document. Source: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lolcats.generation.drafting import Acceptance, PassCosts, counts_to, gain
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention.kernels.support import MAX_TOKENS

PRIOR = 0.5  # acceptance before any token was drafted


@dataclass(frozen=True)
class Lookup:
    """How to draft by lookup.

    Attributes:
        most: most tokens drafted in a round.
        longest, shortest: tokens that must have stood before; longer ones are looked for first.
        adapt: check fewer, or none, where by acceptance and the size of the batch more do not pay.

    Raises:
        ValueError: a number out of range.
    """

    most: int = 8
    longest: int = 3
    shortest: int = 2
    adapt: bool = True

    def __post_init__(self) -> None:
        if self.most < 1 or not 1 <= self.shortest <= self.longest:
            raise ValueError(f"{self}: expected most >= 1 and 1 <= shortest <= longest")


class Repetitions:
    """Where the tokens of one growing sequence stood last.

    Attributes:
        acceptance: of drafts from there, lately.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance(PRIOR)
        self._behind: dict[tuple[int, ...], int] = {}  # tokens -> the place behind their latest occurrence
        self._read = 0

    def draft(self, tokens: Sequence[int], settings: Lookup) -> list[int]:
        """What may follow; `tokens` are those of the last call and some more."""
        end = len(tokens)
        sizes = range(settings.longest, settings.shortest - 1, -1)
        for size in sizes:  # not those at the end, which must be found before it
            begin = max(self._read, size)
            columns = [tokens[begin - size + i : max(end - size + i, 0)] for i in range(size)]
            self._behind.update(zip(zip(*columns, strict=True), range(begin, end), strict=True))
        self._read = end
        for size in sizes:
            if size <= end and (found := self._behind.get(tuple(tokens[end - size :]))) is not None:
                return list(tokens[found : found + settings.most])
        return []


class LookupRounds:
    """How many looked-up tokens a model checks in a round.

    Attributes:
        settings: with no more tokens in a round than the kernels of linear heads take.
    """

    def __init__(self, model: LolcatsForCausalLM, settings: Lookup) -> None:
        most = min(settings.most, MAX_TOKENS - 1) if model.config.linear_layers else settings.most
        self.settings = replace(settings, most=most)
        self.costs = PassCosts(model)

    def tokens(self, drafts: Sequence[Sequence[int]], rates: Sequence[float], lengths: Sequence[int]) -> int:
        """What yields most tokens for what the passes cost; 0: a plain step does.

        Args:
            drafts: of each row, none if empty.
            rates: acceptance in each row.
            lengths: of the rows.
        """
        longest = max(map(len, drafts))
        if not longest or not self.settings.adapt:
            return next(count for count in counts_to(self.settings.most) if count >= longest)

        def speed(count: int) -> float:
            gains = (gain(rate, min(count, len(draft))) for draft, rate in zip(drafts, rates, strict=True))
            return (len(drafts) + sum(gains)) / (self.costs.of(lengths, count + 1) + self.costs.round)

        return max(counts_to(self.settings.most), key=speed)

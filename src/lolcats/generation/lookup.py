"""Prompt lookup: the draft is what followed the latest tokens where they stood before; the model checks it.

A draft costs nothing, neither weights nor a pass. It is right where an answer repeats its context: summaries, edits,
code, questions about a document. Source: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A check takes about a third longer than a step. So drafts of a sequence pause once they gain less than this a round,
# lately, and are tried again after so many steps.
LEAST_GAIN, PAUSE = 0.4, 16
MEMORY = 0.8


@dataclass(frozen=True)
class Lookup:
    """How to draft by lookup.

    Attributes:
        most: most tokens drafted in a round.
        longest, shortest: tokens that must have stood before; longer ones are looked for first.
        adapt: pause where drafts are rejected.

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
    """Where the tokens of one growing sequence stood last, and how good drafts from there were.

    Attributes:
        gain: tokens accepted in a round, a decaying average.
    """

    def __init__(self, settings: Lookup) -> None:
        self.settings = settings
        self.gain = 1.0
        self._behind: dict[tuple[int, ...], int] = {}  # tokens -> the place behind their latest occurrence
        self._read = 0
        self._pause = 0

    def draft(self, tokens: Sequence[int]) -> list[int]:
        """What may follow; `tokens` are those of the last call and some more."""
        settings, end = self.settings, len(tokens)
        sizes = range(settings.longest, settings.shortest - 1, -1)
        for place in range(max(self._read, 1), end):  # not the end, which must be found before itself
            for size in sizes:
                if size <= place:
                    self._behind[tuple(tokens[place - size : place])] = place
        self._read = end
        if self._pause > 0:
            self._pause -= 1
            return []
        for size in sizes:
            if size <= end and (found := self._behind.get(tuple(tokens[end - size :]))) is not None:
                return list(tokens[found : found + settings.most])
        return []

    def note(self, accepted: int) -> None:
        """So many tokens of the latest draft stay."""
        self.gain = MEMORY * self.gain + (1 - MEMORY) * accepted
        if self.settings.adapt and self.gain < LEAST_GAIN:
            self.gain, self._pause = LEAST_GAIN, PAUSE

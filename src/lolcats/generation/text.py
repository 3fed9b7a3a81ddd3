"""Tokens to text as they come: no broken characters, no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"


class Detokenizer:
    """Text of a growing list of tokens, piece by piece; the pieces joined are the text of all tokens.

    A token's text depends on the tokens before it (spaces, characters of several bytes). So each step decodes
    the latest few tokens with and without the new ones and returns the difference, once it ends in a whole
    character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.begin = self.done = 0  # tokens[begin:done] are written out and give the next ones their context

    def push(self, token: int) -> str:
        """The text that the token completes; it may be empty."""
        self.tokens.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self.tokens[self.begin : self.done])
        after = self._decode(self.tokens[self.begin :])
        if len(after) <= len(before) or (after.endswith(_BROKEN) and not final):
            return ""
        self.begin, self.done = self.done, len(self.tokens)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Passes text through up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text that is certain to come before any stop string. `found` says whether one was met."""
        if self.found is not None:
            return ""
        self.held += text
        matches = [(self.held.find(stop), -len(stop), stop) for stop in self.stops if stop in self.held]
        if matches:
            place, _, self.found = min(matches)
            passed, self.held = self.held[:place], ""
            return passed
        keep = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        passed, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return passed

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        passed, self.held = self.held, ""
        return passed


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

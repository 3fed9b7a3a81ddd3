"""Between text and tokens: chat templates, and the text of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lolcats.errors import UserError

_BROKEN = "\ufffd"
# A character has at most four bytes, so that text which is incomplete after this many tokens stays so.
_MOST_PENDING = 32


def chat_text(tokenizer: Any, prompt: str | list[dict[str, str]]) -> str:
    """A user's message, or a conversation, in the tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("this model's tokenizer has no chat template; give plain text, or use a model trained for chat")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise UserError(f"the chat template does not take this conversation: {error}") from error


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a text by the model's generation configuration."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


class Detokenizer:
    """Text of a growing list of tokens, piece by piece; the pieces joined are the text of all tokens.

    A token's text depends on the tokens before it (spaces, characters of several bytes). So each step decodes
    the latest few tokens with and without the new ones and returns the difference, once it ends in a whole
    character. The time per token does not grow with their number.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._context: list[int] = []  # the last tokens whose text was returned
        self._pending: list[int] = []  # tokens whose text was not

    def push(self, token: int) -> str:
        """The text that the token completes; it may be empty."""
        self._pending.append(token)
        return self._advance(final=len(self._pending) > _MOST_PENDING)

    def extend(self, tokens: list[int]) -> None:
        """Add tokens whose text `finish` is to return."""
        self._pending += tokens

    def finish(self) -> str:
        """What was held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        if (len(after) <= len(before) or after.endswith(_BROKEN)) and not final:
            return ""
        if len(after) > len(before):  # else the context stays: the next token's leading space may depend on it
            self._context = self._pending
        self._pending = []
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
        begun = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        keep = max(begun, default=0)  # the longest end of the text that begins a stop string
        passed, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return passed

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        passed, self.held = self.held, ""
        return passed

"""One request on its way through the engine: its text as tokens come, and what its owner gets."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from lolcats.errors import UserError
from lolcats.generation.sampling import SamplingParams

_LOG = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Snapshot:
    """All that a sequence needs to continue.

    Attributes:
        token_ids: all tokens so far.
        length: how many of them the state holds.
        tensors: the state of each layer, as `SlotCache.read` gives it. Its size does not depend on `length`,
            except for exact heads.
        model: which made it.
    """

    token_ids: list[int]
    length: int
    tensors: dict[str, Tensor]
    model: Any


@dataclass(frozen=True)
class Piece:
    """Text that has become certain, with the tokens since the piece before.

    A character may take several tokens, and text that may begin a stop string is held back. Tokens without text
    at the end of an answer belong to no piece.

    Attributes:
        text: at least one character.
        token_ids: the tokens.
        logprobs, top_logprobs: one entry per token if `SamplingParams.logprobs` asked for it, else empty.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Result(Piece):
    """A finished request: its whole text and all of its new tokens.

    Attributes:
        text: without special tokens and without the stop string.
        token_ids: the new tokens, the one that ended the answer included.
        finish_reason: "stop" (end token or stop string), "length", "cancelled" or "error".
        prompt_tokens: tokens before the new ones, those of a snapshot included.
        error: the failure's type and message.
        snapshot: the state at the end, if `SamplingParams.keep_state` asked for it.
    """

    finish_reason: str
    prompt_tokens: int
    error: str | None = None
    snapshot: Snapshot | None = None


class Request:
    """A submitted request. Iterating yields the text as it comes, `result` waits for all.

    Without a background thread (`Engine.start`), waiting runs the engine.

    Args:
        tokens: the snapshot's and the prompt's.
        advance: takes an engine step; False: another thread does.
        note_cancel: called when `cancel` was.
        stream: deliver text as it comes; else, and without stop strings, all at the end, which costs less.
        on_event: called with each `Piece` and then the `Result`, in the engine's thread; instead of iterating.

    Attributes:
        tokens: all tokens so far.
        prompt_tokens: how many of them were there before the first generated one.
        slot: -1 without.
        ends: tokens that end the answer.
        has_end_token: whether the last token ended the answer; it has no text.
    """

    def __init__(
        self,
        tokens: list[int],
        params: SamplingParams,
        tokenizer: Any,
        *,
        advance: Callable[[], bool],
        note_cancel: Callable[[Request], None],
        stream: bool = True,
        on_event: Callable[[Piece], Any] | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.tokens, self.params, self.prompt_tokens = tokens, params, len(tokens)
        self.snapshot, self.slot, self.longest = snapshot, -1, len(tokens) + params.max_new_tokens
        self.ends = frozenset(params.stop_token_ids)
        self.random = random.Random(params.seed if params.seed is None else params.seed % 2**64)  # it takes -1 for 1
        self.stream = stream or bool(params.stop)
        self.stops = StopStrings(params.stop)
        self.has_end_token = False
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self._detokenizer, self._text, self._emitted = Detokenizer(tokenizer), "", 0
        self._advance, self._note_cancel = advance, note_cancel
        self._events: SimpleQueue[Piece] = SimpleQueue()
        self._deliver = on_event or self._events.put
        self._finished = threading.Event()
        self._result: Result | None = None

    # --- the owner's side ----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End the request at the engine's next step; its result is what it has by then."""
        self._note_cancel(self)

    @property
    def done(self) -> bool:
        return self._result is not None

    def result(self) -> Result:
        """The finished result."""
        while self._result is None:
            if not self._advance():
                self._finished.wait()
        return self._result

    def __iter__(self) -> Iterator[str]:
        """Pieces of text; joined they are `Result.text`."""
        while True:
            while self._events.empty() and self._advance():
                pass
            event = self._events.get()
            if isinstance(event, Result):
                self._events.put(event)  # for whoever iterates again
                return
            yield event.text

    # --- the engine's side ---------------------------------------------------------------------------------

    def add_token(self, token: int, logprob: tuple[float, list[tuple[int, float]]] | None) -> str | None:
        """A generated token. Why the answer ends with it; None: it does not."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob[0])
            self.top_logprobs.append(logprob[1])
        if token in self.ends:
            self.has_end_token = True
            return "stop"
        if self.stream:
            self._emit(self.stops.push(self._detokenizer.push(token)))
            if self.stops.found is not None:
                return "stop"
        return "length" if len(self.tokens) >= self.longest else None

    def close_text(self) -> None:
        """The rest of the text, after the last token."""
        if not self.stream:
            end = -1 if self.has_end_token else None
            self._detokenizer.extend(self.tokens[self.prompt_tokens : end])
        if self.stops.found is None:
            self._emit(self.stops.push(self._detokenizer.finish()))
            self._emit(self.stops.finish())

    def _emit(self, text: str) -> None:
        """Deliver text that has become certain."""
        if text:
            self._text += text
            first, self._emitted = self._emitted, len(self.tokens) - self.prompt_tokens
            tokens = self.tokens[self.prompt_tokens + first :]
            self._deliver(Piece(text, tokens, self.logprobs[first:], self.top_logprobs[first:]))

    def end(self, reason: str, error: str | None, snapshot: Snapshot | None) -> None:
        """Deliver the result."""
        self._result = Result(
            self._text,
            self.tokens[self.prompt_tokens :],
            self.logprobs,
            self.top_logprobs,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            error=error,
            snapshot=snapshot,
        )
        self._finished.set()
        try:
            self._deliver(self._result)
        except Exception:  # the request is over, and others are not concerned
            _LOG.exception("a request's on_event failed")

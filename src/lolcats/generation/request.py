"""One request on its way through the engine, and the handle, result and snapshot that its owner gets."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from lolcats.generation.sampling import SamplingParams
from lolcats.generation.text import Detokenizer, StopStrings

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """All that a sequence needs to continue.

    The last token is always outside the state: feeding it gives the logits of the next one, so that none
    need to be kept.

    Attributes:
        token_ids: all tokens so far.
        length: how many of them the state holds; fewer than all.
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
        stop: the stop string or stop token that was met.
        error: the failure's type and message.
        snapshot: the state at the end, if `keep_state` asked for it.
    """

    finish_reason: str
    prompt_tokens: int
    stop: str | int | None = None
    error: str | None = None
    snapshot: Snapshot | None = None


class Handle:
    """A submitted request, as its owner sees it. Iterating yields the text as it comes, `result` waits for all.

    Without a background thread (`Engine.start`), waiting runs the engine.

    Args:
        advance: takes an engine step; False: another thread does.
        note_cancel: called after `cancel_requested` was set.
    """

    def __init__(self, advance: Callable[[], bool], note_cancel: Callable[[], None]) -> None:
        self._advance, self._note_cancel = advance, note_cancel
        self._pieces: SimpleQueue[str | None] = SimpleQueue()  # None: the end
        self._finished = threading.Event()
        self._result: Result | None = None
        self.cancel_requested = False

    def cancel(self) -> None:
        """End the request at the engine's next step; its result is what it has by then."""
        self.cancel_requested = True
        self._note_cancel()

    @property
    def done(self) -> bool:
        return self._result is not None

    def result(self, timeout: float | None = None) -> Result:
        """The finished result.

        Raises:
            TimeoutError: it is not finished after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._result is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < 0:
                raise TimeoutError(f"the request is not finished after {timeout} s")
            if not self._advance():
                self._finished.wait(left)
        return self._result

    def __iter__(self) -> Iterator[str]:
        """Pieces of text; joined they are `Result.text`."""
        while True:
            while self._pieces.empty() and self._advance():
                pass
            piece = self._pieces.get()
            if piece is None:
                self._pieces.put(None)  # for whoever iterates again
                return
            yield piece

    # --- the engine's side ---------------------------------------------------------------------------------

    def put(self, piece: str) -> None:
        self._pieces.put(piece)

    def finish(self, result: Result) -> None:
        self._result = result
        self._pieces.put(None)
        self._finished.set()


@dataclass(eq=False)
class Request:
    """A request inside the engine.

    Attributes:
        tokens: all tokens so far: the snapshot's, the prompt's, the generated ones.
        stream: deliver text as it comes; else, and without stop strings, all at the end, which costs less.
        prefill_only: for snapshots; ends before the prompt's last token is fed.
        prompt_tokens: how many of `tokens` were there before the first generated one.
        fed: how many of `tokens` the slot's state holds.
        slot: -1 without.
        stop_token: the token that ended the answer, if one did; it has no text.
        text: pieces delivered so far.
        emitted: generated tokens that belong to them.
    """

    tokens: list[int]
    params: SamplingParams
    handle: Handle
    detokenizer: Detokenizer
    stream: bool = True
    on_piece: Callable[[Piece], Any] | None = None
    on_finish: Callable[[Result], Any] | None = None
    keep_state: bool = False
    snapshot: Snapshot | None = None
    prefill_only: bool = False
    prompt_tokens: int = field(init=False)
    stops: StopStrings = field(init=False)
    random: random.Random = field(init=False)
    fed: int = 0
    slot: int = -1
    stop_token: int | None = None
    emitted: int = 0
    text: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.stops = StopStrings(self.params.stop)
        seed = self.params.seed
        self.random = random.Random(seed if seed is None else seed % 2**64)  # it takes -1 for 1
        self.stream = self.stream or self.on_piece is not None or bool(self.params.stop)

    @property
    def count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def to_feed(self) -> int:
        """Tokens that prefill has still to feed."""
        return len(self.tokens) - self.fed - (1 if self.prefill_only else 0)

    def add_token(self, token: int, logprob: float | None, top_logprobs: list[tuple[int, float]] | None) -> None:
        """A generated token; its text comes by `add_text`."""
        self.tokens.append(token)
        if logprob is not None and top_logprobs is not None:
            self.logprobs.append(logprob)
            self.top_logprobs.append(top_logprobs)

    def add_text(self, token: int) -> None:
        """Text of the newest token. `stops.found` says whether the answer ends here."""
        self._emit(self.stops.push(self.detokenizer.push(token)))

    def close_text(self) -> str:
        """The whole text, after the last token."""
        if not self.stream:
            end = None if self.stop_token is None else -1
            self.detokenizer.extend(self.tokens[self.prompt_tokens : end])
        if self.stops.found is None:
            self._emit(self.stops.push(self.detokenizer.finish()))
            self._emit(self.stops.finish())
        return "".join(self.text)

    def _emit(self, text: str) -> None:
        """Deliver text that has become certain."""
        if not text:
            return
        self.text.append(text)
        if self.on_piece is not None:
            first, self.emitted = self.emitted, self.count
            tokens = self.tokens[self.prompt_tokens + first :]
            self.on_piece(Piece(text, tokens, self.logprobs[first:], self.top_logprobs[first:]))
        self.handle.put(text)

    def end(self, result: Result) -> None:
        """Deliver the result."""
        self.handle.finish(result)
        if self.on_finish is not None:
            try:
                self.on_finish(result)
            except Exception:  # the request is over, and others are not concerned
                _LOG.exception("a request's on_finish failed")

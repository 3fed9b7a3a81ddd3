"""One request on its way through the engine, and what its owner holds of it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lolcats.generation.params import SamplingParams
from lolcats.generation.snapshot import Snapshot
from lolcats.generation.text import Detokenizer, StopStrings

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Text that has become certain, with the tokens since the piece before.

    A character may take several tokens, and text that may begin a stop string is held back. Tokens without text
    at the end of an answer belong to no piece.

    Attributes:
        text: at least one character.
        token_ids: the tokens.
        logprobs, top_logprobs: of these tokens, as in `Result`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


@dataclass
class Result:
    """What became of a request.

    Attributes:
        text: without special tokens and without the stop string.
        token_ids: the new tokens, the one that ended the answer included.
        finish_reason: "stop" (end token or stop string), "length", "cancelled" or "error".
        prompt_tokens: tokens before the new ones, those of a snapshot included.
        stop: the stop string or stop token that was met.
        logprobs, top_logprobs: one entry per new token if `SamplingParams.logprobs` asked for it.
        error: what went wrong.
        snapshot: the state at the end, if `keep_state` asked for it.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    stop: str | int | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    error: str | None = None
    snapshot: Snapshot | None = None


class Handle:
    """A submitted request, as its owner sees it. Iterating yields the text as it comes, `result` waits for all.

    Without a background thread (`Engine.start`), waiting runs the engine.
    """

    def __init__(self, step: Callable[[], bool], cancelled: Callable[[], None]) -> None:
        self._step, self._cancelled = step, cancelled
        self._pieces: deque[str] = deque()
        self._changed = threading.Condition()
        self._result: Result | None = None
        self.cancel_requested = False

    def cancel(self) -> None:
        """End the request at the engine's next step; what it has by then is its result."""
        self.cancel_requested = True
        self._cancelled()

    @property
    def done(self) -> bool:
        return self._result is not None

    def result(self, timeout: float | None = None) -> Result:
        """The finished result.

        Raises:
            TimeoutError: it is not finished after `timeout` seconds.
        """
        self._wait(lambda: self._result is not None, timeout)
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[str]:
        """Pieces of text; joined they are `Result.text`."""
        while True:
            self._wait(lambda: bool(self._pieces) or self._result is not None, None)
            if not self._pieces:
                return
            yield self._pieces.popleft()

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the request is not finished after {timeout} s")
            if not self._step():  # another thread runs the engine
                with self._changed:
                    self._changed.wait_for(ready, timeout=0.05)

    def wait_a_moment(self) -> None:
        """Wait until something changes, but not long."""
        with self._changed:
            self._changed.wait(timeout=0.05)

    # --- the engine's side ---------------------------------------------------------------------------------

    def put(self, piece: str) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    def finish(self, result: Result) -> None:
        with self._changed:
            self._result = result
            self._changed.notify_all()


@dataclass
class Request:
    """A request inside the engine.

    Attributes:
        tokens: all tokens so far: the snapshot's, the prompt's, the generated ones.
        prompt_tokens: how many of them were there before the first generated one.
        fed: how many of them the slot's state holds.
        prefill_only: for snapshots; ends before the prompt's last token is fed.
        row: its slot, -1 without.
        stop_token: the token that ended the answer, if one did; it has no text.
        told: generated tokens that `on_piece` was told of.
    """

    tokens: list[int]
    params: SamplingParams
    handle: Handle
    on_piece: Callable[[Piece], Any] | None = None
    on_finish: Callable[[Result], Any] | None = None
    keep_state: bool = False
    snapshot: Snapshot | None = None
    prefill_only: bool = False
    fed: int = 0
    row: int = -1
    prompt_tokens: int = 0
    stop_token: int | None = None
    told: int = 0
    detokenizer: Detokenizer | None = None
    stops: StopStrings = field(default_factory=lambda: StopStrings(()))
    random: random.Random = field(default_factory=random.Random)
    text: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.stops = StopStrings(self.params.stop)
        self.random = random.Random(self.params.seed)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def to_feed(self) -> int:
        """Tokens that prefill has still to feed."""
        return len(self.tokens) - self.fed - (1 if self.prefill_only else 0)

    def add_text(self, piece: str) -> None:
        """Text of the newest token. `stops.found` says whether the answer ends here."""
        self._emit(self.stops.push(piece))

    def close_text(self, tokenizer: Any) -> str:
        """The whole text, after the last token."""
        if self.detokenizer is None:
            # Nobody looked at the text before: all at once.
            self.detokenizer = Detokenizer(tokenizer)
            self.detokenizer.tokens = self.generated if self.stop_token is None else self.generated[:-1]
        if self.stops.found is None:
            self._emit(self.stops.push(self.detokenizer.finish()))
            self._emit(self.stops.finish())
        return "".join(self.text)

    def _emit(self, piece: str) -> None:
        if not piece:
            return
        self.text.append(piece)
        if self.on_piece is not None:
            news = slice(self.told, self.count)
            self.told = self.count
            self.on_piece(Piece(piece, self.generated[news], self.logprobs[news], self.top_logprobs[news]))
        self.handle.put(piece)

    def end(self, result: Result) -> None:
        """Tell the owner."""
        self.handle.finish(result)
        if self.on_finish is not None:
            try:
                self.on_finish(result)
            except Exception:  # the request is over, and the others shall not suffer
                _LOG.exception("a request's on_finish failed")

"""From the engine's thread to asyncio: the choices of one HTTP request as a stream of events, without polling."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

from lolcats.generation.engine import Engine
from lolcats.generation.queue import QueueFull
from lolcats.generation.request import Handle, Piece, Result
from lolcats.generation.sampling import SamplingParams
from lolcats.serving.metrics import Metrics
from lolcats.serving.protocol import ApiError

Event = Piece | Result


class Choices:
    """The choices of one HTTP request: they share a deadline, and end together when one fails.

    The engine's callbacks put events into an asyncio queue; the deadline puts its error there too.

    Args:
        timeout_s: seconds until the deadline.
        metrics: counts tokens.
    """

    def __init__(self, engine: Engine, timeout_s: float, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event | ApiError]] = asyncio.Queue()
        self._handles: list[Handle] = []
        self._unfinished = 0
        self._closed = False
        late = ApiError(504, f"the answer was not finished after {timeout_s:g} s", code="timeout")
        self._timer = self._loop.call_later(timeout_s, self._events.put_nowait, (-1, late))

    def submit(self, prompts: list[list[int]], params: list[SamplingParams], n: int, stream: bool) -> None:
        """Queue `n` choices of each prompt, numbered through. Takes a while: not for the event loop's thread.

        Args:
            params: of each prompt; the k-th choice uses `seed` + k, for answers to one prompt are to differ.

        Raises:
            ApiError: 400 what the engine refuses, 429 its queue is full, 503 it is shut down.
        """
        try:
            for index in range(n * len(prompts)):
                tokens, item, choice = prompts[index // n], params[index // n], index % n
                on_event = functools.partial(self._on_event, index, len(tokens))
                handle = self._engine.submit(
                    tokens,
                    item if item.seed is None else item.changed(seed=item.seed + choice),
                    stream=False,
                    on_piece=on_event if stream else None,
                    on_finish=on_event,
                )
                self._handles.append(handle)
                self._unfinished += 1
                if self._closed:
                    handle.cancel()
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"}) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except RuntimeError as error:
            raise ApiError(503, str(error), code="shutting_down") from error

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(choice, event); each choice's pieces, then its result.

        Raises:
            ApiError: 500 the model failed, 503 cancelled by the server, 504 the deadline.
        """
        while self._unfinished:
            index, event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Result):
                self._unfinished -= 1
                if event.finish_reason == "error":
                    raise ApiError(500, f"the model failed: {event.error}", code="model_error")
                if event.finish_reason == "cancelled":
                    raise ApiError(503, "the server is shutting down", code="shutting_down")
            yield index, event

    def cancel(self) -> None:
        """End what is unfinished or is being queued; its slots are free after the engine's next step."""
        self._closed = True
        for handle in self._handles:
            if not handle.done:
                handle.cancel()

    def close(self) -> None:
        """Cancel, and need no deadline any more."""
        self._timer.cancel()
        self.cancel()

    def _on_event(self, index: int, prompt_tokens: int, event: Event) -> None:
        """The engine's callback."""
        if isinstance(event, Result):
            self._metrics.count_tokens(prompt_tokens, len(event.token_ids))
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

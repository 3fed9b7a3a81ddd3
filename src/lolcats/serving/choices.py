"""From the engine's thread to asyncio: the choices of one HTTP request as a stream of events, without polling."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

from lolcats.generation.engine import Engine
from lolcats.generation.queue import QueueFull
from lolcats.generation.request import Handle, Piece, Result
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.snapshot import Snapshot
from lolcats.serving.metrics import Metrics
from lolcats.serving.protocol import ApiError

Event = Piece | Result


class Choices:
    """The choices of one HTTP request: they share a deadline, and end together when one fails.

    The engine's callbacks put events into an asyncio queue; the deadline puts its error there too.

    Args:
        timeout_s: seconds until the deadline.
        metrics: counts tokens; a prompt once, whatever the number of its choices.
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

    async def start(self, prompts: list[list[int]], params: list[SamplingParams], n: int, stream: bool) -> None:
        """Queue `n` choices of each prompt, numbered through; a prompt of several choices is read once.

        Args:
            params: of each prompt; the k-th choice uses `seed` + k, for answers to one prompt are to differ.

        Raises:
            ApiError: 400 what the engine refuses, 429 its queue is full, 503 it is shut down.
        """
        states: list[Snapshot | None] = [None] * len(prompts)
        each = list(zip(prompts, params, states, strict=True))
        if n > 1:
            await asyncio.to_thread(self._submit, each, prefill_only=True)
            async for index, event in self.events():
                if isinstance(event, Result):
                    states[index] = event.snapshot
            each = [
                (tokens, item if item.seed is None else item.changed(seed=item.seed + choice), state)
                for tokens, item, state in zip(prompts, params, states, strict=True)
                for choice in range(n)
            ]
        await asyncio.to_thread(self._submit, each, stream=stream)

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

    def _submit(
        self,
        choices: list[tuple[list[int], SamplingParams, Snapshot | None]],
        *,
        stream: bool = False,
        prefill_only: bool = False,
    ) -> None:
        """Queue choices, each from a snapshot or else with its prompt. Runs in a worker thread: it takes a while."""
        try:
            for index, (tokens, params, snapshot) in enumerate(choices):
                on_event = functools.partial(self._on_event, index, 0 if snapshot else len(tokens))
                handle = self._engine.submit(
                    tokens if snapshot is None else None,
                    params,
                    snapshot=snapshot,
                    stream=False,
                    on_piece=on_event if stream else None,
                    on_finish=on_event,
                    prefill_only=prefill_only,
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

    def _on_event(self, index: int, prompt_tokens: int, event: Event) -> None:
        """The engine's callback; `prompt_tokens` are those that it reads for this choice."""
        if isinstance(event, Result):
            self._metrics.count_tokens(prompt_tokens, len(event.token_ids))
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

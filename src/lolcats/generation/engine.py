"""Many requests at once on one linearized model: continuous batching over static slots.

A step admits waiting requests to free slots in their order, feeds one bounded chunk of prompts, and generates
one token for every running request. A finished request's slot is taken by the next step. So a long prompt
delays running answers by one chunk a step, and short prompts overtake a long one in prefill, which takes turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from lolcats.generation.batch import Batch
from lolcats.generation.fingerprint import model_fingerprint
from lolcats.generation.intake import Intake, Prompt
from lolcats.generation.params import SamplingParams
from lolcats.generation.queue import QueueFull, RequestQueue
from lolcats.generation.request import Handle, Piece, Request, Result
from lolcats.generation.runner import Runner
from lolcats.generation.snapshot import Snapshot
from lolcats.generation.text import Detokenizer


class Engine:
    """Generates for many requests at once.

    Submitting and cancelling are safe from any thread. The model runs in whichever thread waits for a result,
    or in a background thread after `start`.

    Args:
        model: a `LolcatsForCausalLM`.
        tokenizer: of the model.
        max_slots: requests that run at a time; each reserves memory (`runner.bytes_per_slot`).
        prefill_chunk: most prompt tokens, padding included, that go through the model in a step.
        max_length: most tokens of a request, prompt included; only for models that keep softmax layers.
        max_queue: most requests that may wait; None: any number.
        use_graphs: see `Runner`.

    Attributes:
        end_tokens: with which the model ends an answer by itself.

    Raises:
        UserError: not a linearized model, or too little memory.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_slots: int = 32,
        prefill_chunk: int = 512,
        max_length: int | None = None,
        max_queue: int | None = None,
        use_graphs: bool | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: expected at least 1 token")
        if max_queue is not None and max_queue < 1:
            raise ValueError(f"max_queue={max_queue}: expected at least 1 request")
        self.model, self.tokenizer = model, tokenizer
        self.max_queue = max_queue
        self.runner = Runner(model, max_slots, max_length, use_graphs)
        end: Any = model.generation_config.eos_token_id
        self.end_tokens: frozenset[int] = frozenset([end] if isinstance(end, int) else end or ())
        self._batch = Batch(self.runner, tokenizer, prefill_chunk, self.end_tokens, lambda: self.fingerprint)
        self._intake = Intake(tokenizer, self.runner, lambda: self.fingerprint)
        self._queue = RequestQueue(max_queue)
        self._step_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # --- requests ------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt | None,
        params: SamplingParams | None = None,
        *,
        snapshot: Snapshot | None = None,
        keep_state: bool = False,
        stream: bool = True,
        on_piece: Callable[[Piece], Any] | None = None,
        on_finish: Callable[[Result], Any] | None = None,
        prefill_only: bool = False,
        add_special_tokens: bool | None = None,
    ) -> Handle:
        """Queue a request.

        Args:
            prompt: text or token ids. May be None with a snapshot.
            snapshot: go on from this state; the prompt is added to it.
            keep_state: put the state at the end into the result.
            stream: give text out as it comes; False: all at once, which costs less.
            on_piece: called with each piece of text, in the engine's thread.
            on_finish: called with the result, in the engine's thread, when all pieces were given out.
            prefill_only: only feed the prompt, and put the state into the result.
            add_special_tokens: for text; None: unless there is a snapshot.

        Raises:
            ValueError: a prompt or parameters that cannot be served, with what was expected.
            UserError: a snapshot of another model.
            QueueFull: `max_queue` requests wait already.
            RuntimeError: the engine was shut down.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams, got {type(params).__name__}")
        special = snapshot is None if add_special_tokens is None else add_special_tokens
        tokens = self._intake.tokens(prompt, params, snapshot, special)
        self._intake.check_length(len(tokens), 0 if prefill_only else params.max_new_tokens)
        request = Request(
            tokens,
            params,
            Handle(self._drive, self._queue.note_cancel),
            on_piece=on_piece,
            on_finish=on_finish,
            keep_state=keep_state or prefill_only,
            snapshot=snapshot,
            prefill_only=prefill_only,
        )
        if stream or on_piece is not None or params.stop:
            request.detokenizer = Detokenizer(self.tokenizer)
        self._queue.put(request)
        return request.handle

    def snapshot(self, prompt: Prompt, snapshot: Snapshot | None = None) -> Snapshot:
        """The state after a prompt, to start any number of continuations from: `submit(None, snapshot=...)`.

        Raises:
            As `submit`, and RuntimeError if the model failed.
        """
        result = self.submit(prompt, snapshot=snapshot, stream=False, prefill_only=True).result()
        if result.snapshot is None:
            raise RuntimeError(f"no state of the prompt: {result.error or result.finish_reason}")
        return result.snapshot

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Results of all prompts, in their order.

        Raises:
            ValueError: as `submit`, for any of them; the others are cancelled then.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts: expected one for all, or one for each")
        results: list[Any] = [None] * len(prompts)
        for index, result in self.run(enumerate(zip(prompts, each, strict=True)), refuse=True):
            results[index] = result
        return results

    def run(
        self,
        requests: Iterable[tuple[Hashable, tuple[Prompt, SamplingParams | None]]],
        *,
        refuse: bool = False,
    ) -> Iterator[tuple[Any, Result]]:
        """(key, result) of each (key, (prompt, params)), as they finish. Takes requests when it has room.

        Args:
            refuse: raise ValueError for requests that `submit` refuses; else their result says "error".
        """
        room = min(2 * len(self.runner.lengths), self.max_queue or 2 * len(self.runner.lengths))
        source = iter(requests)
        open_: dict[Any, Handle] = {}
        exhausted = False
        try:
            while open_ or not exhausted:
                while not exhausted and len(open_) < room:
                    try:
                        key, (prompt, params) = next(source)
                    except StopIteration:
                        exhausted = True
                        break
                    try:
                        open_[key] = self.submit(prompt, params, stream=False)
                    except QueueFull:  # others submit too
                        source = _chain((key, (prompt, params)), source)
                        break
                    except ValueError as error:
                        if refuse:
                            raise
                        yield key, Result("", [], "error", 0, error=str(error))
                finished = [key for key, handle in open_.items() if handle.done]
                for key in finished:
                    yield key, open_.pop(key).result()
                if not finished and not self._drive():
                    for handle in list(open_.values())[:1]:
                        handle.wait_a_moment()
        finally:
            for handle in open_.values():
                handle.cancel()

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        """Token ids of a prompt; safe from any thread.

        Args:
            special: for text: add the tokenizer's special tokens.

        Raises:
            ValueError: neither text nor tokens of the model's vocabulary.
        """
        return self._intake.encode(prompt, special)

    # --- running -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return len(self._queue) > 0 or self._batch.busy

    @property
    def counts(self) -> dict[str, int]:
        """Requests that wait, are in prefill and run; free slots; tokens that went through the model."""
        return {
            "waiting": len(self._queue),
            "prefilling": len(self._batch.prefilling),
            "running": self._batch.rows.decoding,
            "free_slots": self._batch.rows.free,
            "tokens_prefilled": self.runner.tokens_prefilled,
            "tokens_decoded": self.runner.tokens_decoded,
        }

    def step(self) -> bool:
        """Admit, prefill one chunk, generate one token for each running request. False: nothing is left to do."""
        with self._step_lock:
            for request in self._queue.take_cancelled(self._batch.inside):
                self._batch.finish(request, "cancelled")
            while self._batch.rows.free and (waiting := self._queue.take()) is not None:
                self._batch.admit(waiting)
            self._batch.prefill()
            self._batch.decode()
            return self.busy

    def _drive(self) -> bool:
        """Take a step unless the background thread does. False: it does."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            return False
        self.step()
        return True

    def start(self) -> Engine:
        """Run in a background thread from now on."""
        if self._queue.closed:
            raise RuntimeError("the engine is shut down")
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="lolcats-engine", daemon=True)
            self._thread.start()
        return self

    def shutdown(self, drain: bool = True) -> None:
        """Take no more requests; finish those that are there, or cancel them. Then stop the thread."""
        self._queue.close(cancel=not drain)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self.busy:
            self.step()
        self.runner.close()

    def _loop(self) -> None:
        while self._queue.wait_for_work(lambda: self._batch.busy):
            try:
                self.step()
            except Exception as error:  # a mistake in the engine: nobody shall wait forever
                self._abort(error)

    def _abort(self, error: Exception) -> None:
        with self._step_lock:
            for request in self._queue.take_all() + self._batch.inside():
                self._batch.finish(request, "error", error=f"{type(error).__name__}: {error}")

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.shutdown(drain=kind is None)

    @cached_property
    def fingerprint(self) -> str:
        """`model_fingerprint` of the model."""
        return model_fingerprint(self.model)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest

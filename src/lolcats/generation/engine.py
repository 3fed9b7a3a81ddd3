"""Many requests at once on one linearized model: continuous batching over static slots.

`Engine` is the public interface, safe from any thread; its `Scheduler` says what each step feeds and generates, and
which request has which slot. A step gives free slots to waiting requests in their order (to several at once, if a line
waits), feeds one bounded chunk of prompts, and generates one token for every decoding request. Prompts in prefill take
turns, so that a short one does not wait for a long one, and running answers wait for one chunk at most. Whatever fails
ends the requests that it concerns, and only these.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lolcats.errors import UserError, first_line
from lolcats.generation.request import Piece, Request, Result, Snapshot, end_tokens
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import SamplingParams, choose, logprobs_of
from lolcats.modeling.cache_size import cache_bytes
from lolcats.modeling.softmax import upload

# Where no answer is running, a step takes so many times as many prompt tokens: short passes wait for the host.
ALONE = 8
# Where more requests wait than slots are free, a thirty-second of all slots is given out at once, or what is free after
# some steps: a pass over prompts takes the host as long as several steps.
ADMITTED, MOST_HELD = 32, 16

Prompt = str | Sequence[int]
"""Text or token ids."""
Drawn = tuple[list[Request], Tensor, Tensor]
"""Requests, their logits [B, V] and next tokens [B] on the device, which may not have computed them yet."""


class Engine:
    """Generates for many requests at once.

    Submitting and cancelling are safe from any thread. The model runs in whichever thread waits for a result,
    or in a background thread after `start`. `shutdown` gives the model back as it was.

    Args:
        model: a `LolcatsForCausalLM`.
        tokenizer: of the model.
        max_slots: requests that run at a time; each reserves memory.
        prefill_chunk: most prompt tokens, padding included, that go through the model in a step while answers are
            running; eight times as many while none is.
        max_length: most tokens of a request, prompt included; only for models with exact heads or longrope.
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
        use_graphs: bool | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: expected at least 1 token")
        self.model, self.tokenizer = model, tokenizer
        self.runner = Runner(model, max_slots, max_length, use_graphs)
        self.end_tokens = end_tokens(model)
        self._scheduler = Scheduler(self.runner, prefill_chunk)
        self._tokenizer_lock = threading.Lock()
        self._closed, self._changed = False, threading.Condition()
        self._step_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # --- requests ------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        snapshot: Snapshot | None = None,
        stream: bool = True,
        on_event: Callable[[Piece], Any] | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: text or token ids.
            snapshot: continue from this state; the prompt is added to it, a text without special tokens.
            stream: deliver text as it comes; False: all at once, which costs less.
            on_event: called with each `Piece` and then the `Result`, in the engine's thread; instead of iterating.

        Raises:
            ValueError: a prompt or parameters that cannot be served, with what was expected.
            UserError: a snapshot of another model.
            RuntimeError: the engine was shut down.
        """
        params = SamplingParams() if params is None else params
        tokens = self.encode(prompt, special=snapshot is None)
        stop, vocabulary = max(params.stop_token_ids, default=0), self.runner.vocabulary
        if stop >= vocabulary:
            raise ValueError(f"stop_token_ids: {stop} is outside the vocabulary of {vocabulary} tokens")
        if snapshot is not None:
            if snapshot.model is not self.model:
                raise UserError("this state was made by another model; make it again")
            tokens = snapshot.token_ids + tokens
        if len(tokens) <= (0 if snapshot is None else snapshot.length):
            raise ValueError("the prompt has no tokens; expected at least one")
        limit, new = self.runner.max_length, params.max_new_tokens
        if limit is not None and len(tokens) + new > limit:
            raise ValueError(
                f"{len(tokens)} prompt tokens and {new} new ones are more than the {limit} that a sequence of this"
                " engine may have; shorten the prompt, lower max_new_tokens, or raise max_length (not with longrope)"
            )
        request = Request(
            tokens,
            params,
            self.tokenizer,
            advance=self._advance,
            note_cancel=self._scheduler.cancelled.append,
            stream=stream,
            on_event=on_event,
            snapshot=snapshot,
        )
        if not params.ignore_eos:
            request.ends |= self.end_tokens
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine is shut down")
            self._scheduler.waiting.append(request)
            self._changed.notify_all()
        return request

    def snapshot(self, prompt: Prompt, snapshot: Snapshot | None = None) -> Snapshot:
        """The state after a prompt, to start any number of continuations from: `submit(more, snapshot=...)`.

        Raises:
            RuntimeError: the model failed; also what `submit` raises.
        """
        one = SamplingParams(max_new_tokens=1, keep_state=True)
        result = self.submit(prompt, one, snapshot=snapshot, stream=False).result()
        if result.snapshot is None:
            raise RuntimeError(f"no state of the prompt: {result.error or result.finish_reason}")
        return replace(result.snapshot, token_ids=result.snapshot.token_ids[:-1])

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Results of all prompts, in their order; a text is one prompt.

        Raises:
            ValueError: as `submit`, for any of them; the others are cancelled then.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts: expected one for all, or one for each")
        requests: list[Request] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                requests.append(self.submit(prompt, own, stream=False))
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        """Token ids of a prompt; safe from any thread.

        Args:
            special: for text: add the tokenizer's special tokens.

        Raises:
            ValueError: neither text nor tokens of the model's vocabulary (Gemma 3's <image_soft_token> is beyond it).
        """
        if isinstance(prompt, str):
            prompt.encode()  # raises for lone surrogates, which JSON can bring
            with self._tokenizer_lock:  # fast tokenizers refuse concurrent calls
                prompt = self.tokenizer(prompt, add_special_tokens=special)["input_ids"]
        if not isinstance(prompt, Sequence):
            raise ValueError(f"prompt: expected text or a list of token ids, got {type(prompt).__name__}")
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.runner.vocabulary:
                raise ValueError(f"prompt: expected token ids from 0 to {self.runner.vocabulary - 1}, got {token!r}")
        return [int(token) for token in prompt]

    # --- running -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.busy

    @property
    def counts(self) -> dict[str, int]:
        """Requests that wait, are in prefill and decode; free slots; tokens that went through the model."""
        return {
            "waiting": len(self._scheduler.waiting),
            "prefilling": len(self._scheduler.prefilling),
            "running": self._scheduler.decoding,
            "free_slots": self._scheduler.owner.count(None),
            "tokens_prefilled": self.runner.tokens_prefilled,
            "tokens_decoded": self.runner.tokens_decoded,
        }

    def step(self) -> bool:
        """Admit, prefill one chunk, generate one token for each decoding request. False: no request is left."""
        with self._step_lock:
            self._scheduler.step()
            return self.busy

    def _advance(self) -> bool:
        """Take a step unless the background thread does. False: it does."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            return False
        self.step()
        return True

    def start(self) -> Engine:
        """Run in a background thread from now on."""
        if self._closed:
            raise RuntimeError("the engine is shut down")
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="lolcats-engine", daemon=True)
            self._thread.start()
        return self

    def shutdown(self, drain: bool = True) -> None:
        """Accept no more requests; finish the present ones, or cancel them. Then stop the thread and free the model.

        Args:
            drain: False: cancel.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not drain:
            with self._step_lock:
                self._scheduler.cancelled.extend(self._scheduler.requests)
        if (thread := self._thread) is not None:
            thread.join()
            self._thread = None
        while self.busy:
            self.step()
        self.runner.close()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.busy or self._closed)
            if not self.busy:
                return
            try:
                self.step()
            except Exception as error:  # a mistake in the engine: no owner may wait forever
                with self._step_lock:
                    self._scheduler.fail(self._scheduler.requests, error)

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.shutdown(drain=kind is None)


def slots_in_memory(model: Any, length: int, most: int) -> int:
    """Sequences of `length` tokens at a time: half of the free memory of a GPU may hold their caches."""
    if model.device.type != "cuda":
        return min(16, most)
    free = torch.cuda.mem_get_info(model.device)[0]
    return max(1, min(most, free // 2 // cache_bytes(model.config, length, model.dtype)))


class Scheduler:
    """Runs requests over slots; `step` is called by one thread at a time, requests are added by any.

    Decoding requests fill slots 0 .. `decoding` - 1 without a gap, so that a decode step works on views of fixed
    address and costs what its requests cost. Requests in prefill have slots behind them.

    Args:
        prefill_chunk: most prompt tokens of a step, padding included, while answers are running; else `ALONE` times
            as many.

    Attributes:
        waiting: requests without a slot, first come, first served.
        cancelled: requests that are to end.
        owner: the request in each slot.
        prefilling: requests in prefill.
    """

    def __init__(self, runner: Runner, prefill_chunk: int) -> None:
        self.runner, self.cache, self.prefill_chunk = runner, runner.cache, prefill_chunk
        self.waiting: deque[Request] = deque()
        self.cancelled: deque[Request] = deque()
        self.owner: list[Request | None] = [None] * runner.cache.max_slots
        self.decoding = self.held = 0
        self.prefilling: deque[Request] = deque()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting) or any(self.owner)

    @property
    def requests(self) -> list[Request]:
        """All unfinished ones; the last slot comes first, so that none has to move when they end in this order."""
        return [request for request in reversed(self.owner) if request is not None] + list(self.waiting)

    def step(self) -> None:
        """Admit, prefill one chunk, generate one token for each decoding request."""
        while self.cancelled:
            request = self.cancelled.popleft()
            if not request.done:
                self.finish(request, "cancelled")
        free = self.owner.count(None)
        self.held = self.held + 1 if free and self.waiting else 0
        if free >= min(len(self.waiting), len(self.owner) // ADMITTED or 1) or self.held > MOST_HELD:
            self.held = 0
            for _ in range(min(free, len(self.waiting))):
                self._admit(self.waiting.popleft())
        decoded = self._decode()  # meanwhile the host launches the pass over prompts
        try:
            self._accept(self._prefill(), first=True)
        finally:  # the slots hold these tokens, whatever happens
            self._accept(decoded)

    def _admit(self, request: Request) -> None:
        """Give a request the first free slot, with the state that it starts from."""
        self._assign(self.owner.index(None, self.decoding), request)
        self.prefilling.append(request)
        try:
            if request.snapshot is None:
                self.cache.clear(request.slot)
            else:
                self.cache.write(request.slot, request.snapshot.length, request.snapshot.tensors)
        except Exception as error:
            self.fail([request], error)

    def _prefill(self) -> Drawn | None:
        """Feed a chunk of prompts. Finished ones get their first token; the others move to the end of the line."""
        picked: list[tuple[Request, list[int]]] = []
        width = 0
        most = self.prefill_chunk if self.decoding else ALONE * self.prefill_chunk
        for request in self.prefilling:
            fed = self.cache.lengths[request.slot]
            chunk = request.tokens[fed : fed + most]
            if picked and max(width, len(chunk)) * (len(picked) + 1) > most:
                break
            picked.append((request, chunk))
            width = max(width, len(chunk))
        if not picked:
            return None
        try:
            logits_BV = self.runner.prefill([request.slot for request, _ in picked], [chunk for _, chunk in picked])
        except Exception as error:
            self.fail([request for request, _ in picked], error)
            return None
        ready: list[int] = []
        for index, (request, _) in enumerate(picked):
            self.prefilling.popleft()
            if self.cache.lengths[request.slot] < len(request.tokens):
                self.prefilling.append(request)
            else:
                ready.append(index)
        return self._draw([picked[index][0] for index in ready], lambda: logits_BV[upload(ready, logits_BV.device)])

    def _decode(self) -> Drawn | None:
        """One more token for every decoding request."""
        requests = [request for request in self.owner[: self.decoding] if request is not None]
        return self._draw(requests, lambda: self.runner.decode([request.tokens[-1] for request in requests]))

    def _draw(self, requests: list[Request], logits: Callable[[], Tensor]) -> Drawn | None:
        """Choose each request's next token, by the logits that a function computes if there are any requests."""
        if not requests:
            return None
        params, uniforms = [request.params for request in requests], [request.random.random() for request in requests]
        try:
            logits_BV = logits()
            return requests, logits_BV, choose(logits_BV, params, uniforms)
        except Exception as error:
            self.fail(requests, error)
            return None

    def _accept(self, drawn: Drawn | None, first: bool = False) -> None:
        """Give requests their next tokens and finish those that these end.

        Args:
            first: the requests come from prefill; those that do not end begin to decode.
        """
        if drawn is None:
            return
        requests, logits_BV, token_B = drawn
        try:
            tokens = token_B.tolist()
            logprobs = logprobs_of(logits_BV, tokens, [request.params for request in requests])
        except Exception as error:
            self.fail(requests, error)
            return
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if token < 0:
                self.finish(request, "error", error="the model's logits are not finite (NaN or infinite)")
                continue
            try:
                reason = request.add_token(token, logprob)
                if first and reason is None:
                    self._start_decoding(request)
            except Exception as error:  # a tokenizer's or a callback's
                self.fail([request], error)
                continue
            if reason is not None:
                self.finish(request, reason)

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request, waiting or running, and free its slot."""
        snapshot = None
        try:
            request.close_text()
            if request.stops.found is not None and reason == "length":
                reason = "stop"  # it was in what was held back
            if request.params.keep_state and request.slot >= 0 and reason != "error":
                tensors = self.cache.read(request.slot)
                length = self.cache.lengths[request.slot]
                snapshot = Snapshot(list(request.tokens), length, tensors, self.runner.model)
        except Exception as failure:
            reason, error = "error", error or _describe(failure)
        line = self.waiting if request.slot < 0 else self.prefilling
        if request in line:
            line.remove(request)
        if request.slot >= 0:
            self._release(request)
        request.end(reason, error, snapshot)

    def fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            self.finish(request, "error", error=_describe(error))

    # --- slots ---------------------------------------------------------------------------------------------

    def _start_decoding(self, request: Request) -> None:
        """Bring a request from behind to the end of the decoding ones."""
        slot, target = request.slot, self.decoding
        other = self.owner[target]
        if other is not request:
            if other is None:
                self.cache.move(slot, target)
            else:
                self.cache.exchange(slot, target)
            self._assign(slot, other)
            self._assign(target, request)
        self.decoding += 1

    def _release(self, request: Request) -> None:
        """Free a request's slot; the last decoding request closes the gap."""
        slot = request.slot
        if slot < self.decoding:
            last = self.decoding - 1
            if slot != last:
                self.cache.move(last, slot)  # if it fails, nothing has changed
                self._assign(slot, self.owner[last])
            slot = self.decoding = last
        request.slot = -1
        self.owner[slot] = None

    def _assign(self, slot: int, request: Request | None) -> None:
        self.owner[slot] = request
        if request is not None:
            request.slot = slot


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"

"""What each step feeds and generates, and for which requests.

A step gives free slots to waiting requests in their order, feeds one bounded chunk of prompts, and generates one token
for every decoding request. Prompts in prefill take turns, so that a short one does not wait for a long one, and running
answers wait for one chunk at most. Whatever fails ends the requests that it concerns, and only these.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from lolcats.generation.assignment import SlotAssignment
from lolcats.generation.queue import WaitingQueue
from lolcats.generation.request import Request, Result, Snapshot
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import SeenTokens, choose

# Where no answer is running, a step takes so many times as many prompt tokens: short passes wait for the host.
ALONE = 8


class Scheduler:
    """Runs requests over slots; `step` is called by one thread at a time.

    Args:
        prefill_chunk: most prompt tokens of a step, padding included, while answers are running; else `ALONE` times
            as many.
        max_queue: see `WaitingQueue`.
        end_tokens: the model's own.
    """

    def __init__(self, runner: Runner, prefill_chunk: int, max_queue: int | None, end_tokens: frozenset[int]) -> None:
        slots = len(runner.lengths)
        self.runner, self.prefill_chunk, self.end_tokens = runner, prefill_chunk, end_tokens
        self.waiting = WaitingQueue(max_queue)
        self.slots = SlotAssignment(slots, self._move, self._exchange)
        self.prefilling: deque[Request] = deque()
        self._seen = SeenTokens(slots, runner.device)

    @property
    def running(self) -> bool:
        """Whether any request has a slot."""
        return bool(self.slots.requests)

    def step(self) -> None:
        """Admit, prefill one chunk, generate one token for each decoding request."""
        for request in self.waiting.take_cancelled(lambda: self.slots.requests):
            self._finish(request, "cancelled")
        while self.slots.free and (waiting := self.waiting.take()) is not None:
            self._admit(waiting)
        self._prefill()
        self._decode()

    def cancel_all(self) -> None:
        """End every request at the next step."""
        for request in [*self.waiting, *self.slots.requests]:
            request.handle.cancel()

    def fail_all(self, error: Exception) -> None:
        """End every request."""
        self.cancel_all()
        self._fail(self.waiting.take_cancelled(lambda: self.slots.requests), error)

    def _admit(self, request: Request) -> None:
        """Give a request a free slot, with the state that it starts from."""
        slot = self.slots.take(request)
        try:
            if request.snapshot is None:
                self.runner.clear(slot)
            else:
                self.runner.write(slot, request.snapshot.length, request.snapshot.tensors)
                request.fed = request.snapshot.length
        except Exception as error:
            self._fail([request], error)
            return
        self.prefilling.append(request)
        if request.to_feed <= 0:
            self._finish(request, "length")

    def _prefill(self) -> None:
        """Feed a chunk of prompts. Finished ones get their first token; the others move to the end of the line."""
        picked: list[tuple[Request, int]] = []
        width = 0
        most = self.prefill_chunk if self.slots.decoding else ALONE * self.prefill_chunk
        for request in self.prefilling:
            take = min(request.to_feed, most)
            if picked and max(width, take) * (len(picked) + 1) > most:
                break
            picked.append((request, take))
            width = max(width, take)
        if not picked:
            return
        requests = [request for request, _ in picked]
        try:
            logits_BV = self.runner.prefill(
                [request.slot for request in requests],
                [request.tokens[request.fed : request.fed + take] for request, take in picked],
            )
        except Exception as error:
            self._fail(requests, error)
            return
        ready: list[int] = []
        for index, (request, take) in enumerate(picked):
            request.fed += take
            if request.to_feed > 0:
                self.prefilling.rotate(-1)
                continue
            self.prefilling.popleft()
            if request.prefill_only:
                self._finish(request, "length")
            else:
                ready.append(index)
        if ready:
            self._generate([requests[index] for index in ready], logits_BV[ready], first=True)

    def _decode(self) -> None:
        """One more token for every decoding request."""
        requests = self.slots.decoding_requests()
        if not requests:
            return
        try:
            logits_BV = self.runner.decode([request.tokens[-1] for request in requests])
        except Exception as error:
            self._fail(requests, error)
            return
        for request in requests:
            request.fed += 1
        self._generate(requests, logits_BV)

    def _generate(self, requests: list[Request], logits_BV: Tensor, first: bool = False) -> None:
        """Choose each request's next token and finish those that it ends.

        Args:
            first: the requests come from prefill; those that do not end begin to decode.
        """
        uniforms = [request.random.random() if request.params.temperature > 0 else 0.0 for request in requests]
        for request, token, logprob, top in self._choose(requests, logits_BV, uniforms, first):
            if token < 0:
                self._finish(request, "error", error="the model's logits are not finite (NaN or infinite)")
                continue
            try:
                request.add_token(token, logprob, top)
                reason = self._end_reason(request, token)
                if first and reason is None:
                    self.slots.start_decoding(request)
            except Exception as error:  # a tokenizer's or a callback's
                self._fail([request], error)
                continue
            if reason is not None:
                self._finish(request, reason)

    def _choose(
        self, requests: list[Request], logits_BV: Tensor, uniforms: list[float], first: bool
    ) -> list[tuple[Request, int, float | None, list[tuple[int, float]] | None]]:
        """Each request with its token, log-probability and likeliest tokens; those that fail are ended."""
        params = [request.params for request in requests]
        slots = [request.slot for request in requests]
        try:
            for request in requests:
                if first and request.params.penalties:
                    self._seen.start(request.slot, request.tokens, logits_BV.shape[1])
            chosen = choose(logits_BV, params, uniforms, self._seen, slots)
            marked = [index for index, item in enumerate(params) if item.penalties and chosen.tokens[index] >= 0]
            self._seen.add([slots[index] for index in marked], [chosen.tokens[index] for index in marked])
        except Exception as error:
            if len(requests) == 1:
                self._fail(requests, error)
                return []
            each = zip(requests, logits_BV.split(1), uniforms, strict=True)  # whose fault is it?
            return [row for request, *own in each for row in self._choose([request], own[0], [own[1]], first)]
        return list(zip(requests, chosen.tokens, chosen.logprobs, chosen.top_logprobs, strict=True))

    def _end_reason(self, request: Request, token: int) -> str | None:
        """Why the answer ends with its newest token; None: it does not."""
        params = request.params
        if token in params.stop_token_ids or (token in self.end_tokens and not params.ignore_eos):
            request.stop_token = token
            return "stop"
        if request.stream:
            request.add_text(token)
            if request.stops.found is not None:
                return "stop"
        return "length" if request.count >= params.max_new_tokens else None

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request, waiting or running, and free its slot."""
        snapshot = None
        try:
            text = request.close_text()
            if request.stops.found is not None and reason == "length":
                reason = "stop"  # it was in what was held back
            if request.keep_state and request.slot >= 0 and reason != "error":
                tensors = self.runner.read(request.slot)
                snapshot = Snapshot(list(request.tokens), request.fed, tensors, self.runner.model)
        except Exception as failure:
            reason, error, text = "error", error or _describe(failure), "".join(request.text)
        if request.slot >= 0:
            if request in self.prefilling:
                self.prefilling.remove(request)
            self.slots.release(request)
        stop = request.stops.found if request.stop_token is None else request.stop_token
        request.end(
            Result(
                text,
                request.tokens[request.prompt_tokens :],
                request.logprobs,
                request.top_logprobs,
                finish_reason=reason,
                prompt_tokens=request.prompt_tokens,
                stop=stop if reason == "stop" else None,
                error=error,
                snapshot=snapshot,
            )
        )

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            self._finish(request, "error", error=_describe(error))

    def _move(self, source: int, target: int) -> None:
        self.runner.move(source, target)
        self._seen.move([source], [target])

    def _exchange(self, first: int, second: int) -> None:
        tensors, length = self.runner.read(first), self.runner.lengths[first]
        self.runner.move(second, first)
        self.runner.write(second, length, tensors)
        self._seen.move([first, second], [second, first])


def _describe(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"

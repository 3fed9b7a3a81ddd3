"""The continuous-batching scheduler: what each step feeds and generates, and which request has which slot.

A step gives free slots to waiting requests in their order, feeds one bounded chunk of prompts, and generates one token
for every decoding request. Prompts in prefill take turns, so that a short one does not wait for a long one, and running
answers wait for one chunk at most. Whatever fails ends the requests that it concerns, and only these.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from lolcats.generation.request import Request, Snapshot
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import choose, logprobs_of

# Where no answer is running, a step takes so many times as many prompt tokens: short passes wait for the host.
ALONE = 8


class Scheduler:
    """Runs requests over slots; `step` is called by one thread at a time, requests are added by any.

    Decoding requests fill slots 0 .. `decoding` - 1 without a gap, so that a decode step works on views of fixed
    address and costs what its requests cost. Requests in prefill have slots behind them.

    Args:
        prefill_chunk: most prompt tokens of a step, padding included, while answers are running; else `ALONE` times
            as many.
        end_tokens: the model's own.

    Attributes:
        waiting: requests without a slot, first come, first served.
        cancelled: requests that are to end.
        owner: the request in each slot.
        prefilling: requests in prefill.
    """

    def __init__(self, runner: Runner, prefill_chunk: int, end_tokens: frozenset[int]) -> None:
        self.runner, self.cache = runner, runner.cache
        self.prefill_chunk, self.end_tokens = prefill_chunk, end_tokens
        self.waiting: deque[Request] = deque()
        self.cancelled: deque[Request] = deque()
        self.owner: list[Request | None] = [None] * runner.cache.max_slots
        self.decoding = 0
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
        while self.waiting and None in self.owner:
            self._admit(self.waiting.popleft())
        self._prefill()
        self._decode()

    def _admit(self, request: Request) -> None:
        """Give a request the last free slot, with the state that it starts from."""
        self._assign(max(slot for slot, owner in enumerate(self.owner) if owner is None), request)
        self.prefilling.append(request)
        try:
            if request.snapshot is None:
                self.cache.clear(request.slot)
            else:
                self.cache.write(request.slot, request.snapshot.length, request.snapshot.tensors)
                request.fed = request.snapshot.length
        except Exception as error:
            self.fail([request], error)

    def _prefill(self) -> None:
        """Feed a chunk of prompts. Finished ones get their first token; the others move to the end of the line."""
        picked: list[tuple[Request, int]] = []
        width = 0
        most = self.prefill_chunk if self.decoding else ALONE * self.prefill_chunk
        for request in self.prefilling:
            take = min(len(request.tokens) - request.fed, most)
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
            self.fail(requests, error)
            return
        ready: list[int] = []
        for index, (request, take) in enumerate(picked):
            request.fed += take
            self.prefilling.popleft()
            if request.fed < len(request.tokens):
                self.prefilling.append(request)
            else:
                ready.append(index)
        if ready:
            self._generate([requests[index] for index in ready], logits_BV[ready], first=True)

    def _decode(self) -> None:
        """One more token for every decoding request."""
        requests = [request for request in self.owner[: self.decoding] if request is not None]
        if not requests:
            return
        try:
            logits_BV = self.runner.decode([request.tokens[-1] for request in requests])
        except Exception as error:
            self.fail(requests, error)
            return
        for request in requests:
            request.fed += 1
        self._generate(requests, logits_BV)

    def _generate(self, requests: list[Request], logits_BV: Tensor, first: bool = False) -> None:
        """Choose each request's next token and finish those that it ends.

        Args:
            first: the requests come from prefill; those that do not end begin to decode.
        """
        try:
            params = [request.params for request in requests]
            uniforms = [request.random.random() if request.params.temperature > 0 else 0.0 for request in requests]
            tokens = choose(logits_BV, params, uniforms)
            logprobs = logprobs_of(logits_BV, tokens, params)
        except Exception as error:
            self.fail(requests, error)
            return
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if token < 0:
                self.finish(request, "error", error="the model's logits are not finite (NaN or infinite)")
                continue
            try:
                request.add_token(token, logprob)
                reason = self._end_reason(request, token)
                if first and reason is None:
                    self._start_decoding(request)
            except Exception as error:  # a tokenizer's or a callback's
                self.fail([request], error)
                continue
            if reason is not None:
                self.finish(request, reason)

    def _end_reason(self, request: Request, token: int) -> str | None:
        """Why the answer ends with its newest token; None: it does not."""
        params = request.params
        if token in params.stop_token_ids or (token in self.end_tokens and not params.ignore_eos):
            request.has_end_token = True
            return "stop"
        if request.stream:
            request.add_text(token)
            if request.stops.found is not None:
                return "stop"
        return "length" if request.new_tokens >= params.max_new_tokens else None

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request, waiting or running, and free its slot."""
        snapshot = None
        try:
            request.close_text()
            if request.stops.found is not None and reason == "length":
                reason = "stop"  # it was in what was held back
            if request.params.keep_state and request.slot >= 0 and reason != "error":
                tensors = self.cache.read(request.slot)
                snapshot = Snapshot(list(request.tokens), request.fed, tensors, self.runner.model)
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
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"

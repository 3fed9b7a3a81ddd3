"""The requests that have a slot: admitting, feeding, generating, finishing them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lolcats.generation.penalties import SeenTokens
from lolcats.generation.request import Request, Result
from lolcats.generation.rows import Rows
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import choose
from lolcats.generation.snapshot import Snapshot


class Batch:
    """Requests in slots. Whatever goes wrong ends the requests that it concerns, and only these.

    Args:
        prefill_chunk: most prompt tokens of a step, padding included.
        end_tokens: the model's own.
        fingerprint: gives the model's fingerprint, for snapshots.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        prefill_chunk: int,
        end_tokens: frozenset[int],
        fingerprint: Callable[[], str],
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.prefill_chunk, self.end_tokens = prefill_chunk, end_tokens
        self.fingerprint = fingerprint
        self.rows = Rows(len(runner.lengths), self._move, self._exchange)
        self.seen = SeenTokens(len(runner.lengths), runner.device)
        self.prefilling: deque[Request] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.prefilling) or self.rows.decoding > 0

    def inside(self) -> list[Request]:
        return [*self.prefilling, *self.rows.front()]

    def admit(self, request: Request) -> None:
        """Give a request a free slot, with the state that it starts from."""
        row = self.rows.take(request)
        try:
            if request.snapshot is None:
                self.runner.clear(row)
            else:
                self.runner.write(row, request.snapshot.length, request.snapshot.tensors)
                request.fed = request.snapshot.length
        except Exception as error:
            self.finish(request, "error", error=_describe(error))
            return
        self.prefilling.append(request)
        if request.to_feed <= 0:
            self.finish(request, "length")

    def prefill(self) -> None:
        """Feed a chunk of prompts. Those that are done get their first token; the others go to the end of the line."""
        picked: list[tuple[Request, int]] = []
        width = 0
        for request in self.prefilling:
            take = min(request.to_feed, self.prefill_chunk)
            if picked and max(width, take) * (len(picked) + 1) > self.prefill_chunk:
                break
            picked.append((request, take))
            width = max(width, take)
        if not picked:
            return
        requests = [request for request, _ in picked]
        try:
            logits_BV = self.runner.prefill(
                [request.row for request in requests],
                [request.tokens[request.fed : request.fed + take] for request, take in picked],
            )
        except Exception as error:
            self._fail(requests, error)
            return
        ready = []
        for index, (request, take) in enumerate(picked):
            request.fed += take
            if request.to_feed > 0:
                self.prefilling.rotate(-1)
            elif request.prefill_only:
                self.prefilling.popleft()
                self.finish(request, "length")
            else:
                self.prefilling.popleft()
                ready.append((index, request))
        if ready:
            chosen = [request for _, request in ready]
            for request in chosen:
                if request.params.penalties:
                    self.seen.start(request.row, request.tokens, logits_BV.shape[1])
            self._generate(chosen, logits_BV[[index for index, _ in ready]], self.rows.start)

    def decode(self) -> None:
        """One more token for every decoding request."""
        requests = self.rows.front()
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

    def _generate(
        self, requests: list[Request], logits_BV: Tensor, go_on: Callable[[Request], None] | None = None
    ) -> None:
        """Choose each request's next token; finish those that it ends, and let the others `go_on`."""
        params = [request.params for request in requests]
        rows = [request.row for request in requests]
        penalised = [index for index, item in enumerate(params) if item.penalties]
        uniforms = [request.random.random() if request.params.temperature > 0 else 0.0 for request in requests]
        try:
            chosen = choose(logits_BV, params, uniforms, self.seen.of(rows) if penalised else None)
            marked = [index for index in penalised if chosen.tokens[index] >= 0]
            self.seen.add([rows[index] for index in marked], [chosen.tokens[index] for index in marked])
        except Exception as error:
            self._fail(requests, error)
            return
        for index, request in enumerate(requests):
            token = chosen.tokens[index]
            if token < 0:
                self.finish(request, "error", error="the model's logits are not finite (NaN or infinite)")
                continue
            request.tokens.append(token)
            logprob, top = chosen.logprobs[index], chosen.top_logprobs[index]
            if logprob is not None and top is not None:
                request.logprobs.append(logprob)
                request.top_logprobs.append(top)
            try:
                if not self._ended(request, token) and go_on is not None:
                    go_on(request)
            except Exception as error:  # a tokenizer's or a callback's
                self.finish(request, "error", error=_describe(error))

    def _ended(self, request: Request, token: int) -> bool:
        params = request.params
        if token in params.stop_token_ids or (token in self.end_tokens and not params.ignore_eos):
            request.stop_token = token
            self.finish(request, "stop", stop=token)
            return True
        if request.detokenizer is not None:
            request.add_text(request.detokenizer.push(token))
            if request.stops.found is not None:
                self.finish(request, "stop", stop=request.stops.found)
                return True
        if request.count >= params.max_new_tokens:
            self.finish(request, "length")
            return True
        return False

    def finish(self, request: Request, reason: str, *, stop: str | int | None = None, error: str | None = None) -> None:
        """End a request, wherever it is, and free its slot."""
        text = ""
        try:
            text = request.close_text(self.tokenizer)
            if request.stops.found is not None and reason == "length":
                reason, stop = "stop", request.stops.found  # it was in what was held back
        except Exception as failure:
            reason, error, text = "error", error or _describe(failure), "".join(request.text)
        snapshot = None
        if request.row >= 0:
            if request.keep_state and reason != "error":
                try:
                    tensors = self.runner.read(request.row)
                    snapshot = Snapshot(list(request.tokens), request.fed, tensors, self.fingerprint())
                except Exception as failure:
                    reason, error = "error", _describe(failure)
            if request in self.prefilling:
                self.prefilling.remove(request)
            self.rows.release(request)
        asked = request.params.logprobs is not None
        request.end(
            Result(
                text=text,
                token_ids=request.generated,
                finish_reason=reason,
                prompt_tokens=request.prompt_tokens,
                stop=stop,
                logprobs=request.logprobs if asked else None,
                top_logprobs=request.top_logprobs if asked else None,
                error=error,
                snapshot=snapshot,
            )
        )

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            self.finish(request, "error", error=_describe(error))

    def _move(self, source: int, target: int) -> None:
        self.runner.move(source, target)
        self.seen.move(source, target)

    def _exchange(self, first: int, second: int) -> None:
        tensors, length = self.runner.read(first), self.runner.lengths[first]
        self.runner.move(second, first)
        self.runner.write(second, length, tensors)
        self.seen.exchange(first, second)


def _describe(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"

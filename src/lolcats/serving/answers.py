"""Bodies of responses, whole and in chunks, in both of the protocol's formats."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from typing import Any

from lolcats.generation.request import Piece, Result

_BROKEN = "\ufffd"


class CompletionFormat:
    """The response to one HTTP request to /v1/completions.

    Attributes:
        usage: tokens so far; prompts count once, whatever the number of their answers.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Any, model: str, prompt_tokens: int, with_logprobs: bool) -> None:
        self._tokenizer, self._with_logprobs = tokenizer, with_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._prompt_tokens, self._new_tokens = prompt_tokens, 0
        self._emitted: Counter[int] = Counter()  # tokens of each choice that chunks were made of

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = self._prompt_tokens, self._new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The body of an answer that is not streamed; `results` in the order of the choices."""
        choices = []
        for index, result in enumerate(results):
            self._new_tokens += len(result.token_ids)
            choices.append(self._choice(index, result.text) | self._end(result, result.finish_reason))
        return self._head | {"object": self.kind, "choices": choices, "usage": self.usage}

    def first(self, choices: int) -> list[dict[str, Any]]:
        """Chunks before any token."""
        return []

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk of new text."""
        self._emitted[index] += len(piece.token_ids)
        return self._chunk([self._delta(index, piece.text) | self._end(piece, None)])

    def last(self, index: int, result: Result) -> dict[str, Any]:
        """The chunk that ends a choice; it has the log-probabilities of tokens without text."""
        self._new_tokens += len(result.token_ids)
        left = slice(self._emitted[index], None)
        rest = Piece("", result.token_ids[left], result.logprobs[left], result.top_logprobs[left])
        return self._chunk([self._delta(index, "") | self._end(rest, result.finish_reason)])

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([]) | {"usage": self.usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.chunk_kind, "choices": choices}

    def _end(self, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(piece) if self._with_logprobs and piece.token_ids else None
        return {"logprobs": logprobs, "finish_reason": finish_reason}

    def _token(self, token: int) -> tuple[str, bool]:
        """Its text, or its name in the vocabulary if it is a part of a character; whether it is text."""
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if _BROKEN in text:
            return name or text, False
        return " " + text if name[:1] == "\u2581" and text[:1] != " " else text, True  # SentencePiece drops the space

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        """One choice of a whole answer, without logprobs and finish_reason."""
        return {"index": index, "text": text}

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        """One choice of a chunk, likewise."""
        return self._choice(index, text)

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        texts = [self._token(token)[0] for token in piece.token_ids]
        top = [{self._token(token)[0]: value for token, value in likeliest} for likeliest in piece.top_logprobs]
        return {"tokens": texts, "token_logprobs": piece.logprobs, "top_logprobs": top}


class ChatFormat(CompletionFormat):
    """The response to one HTTP request to /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def first(self, choices: int) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index} | start]) for index in range(choices)]

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text}}

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text, whole = self._token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

        content = []
        for token, logprob, likeliest in zip(piece.token_ids, piece.logprobs, piece.top_logprobs, strict=True):
            content.append(entry(token, logprob) | {"top_logprobs": [entry(*other) for other in likeliest]})
        return {"content": content, "refusal": None}

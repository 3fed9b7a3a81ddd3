"""Bodies of responses, whole and in chunks, in both of the protocol's formats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lolcats.generation.request import Piece, Result

_BROKEN = "\ufffd"
# Characters that stand for bytes in the names of byte-level tokens (GPT-2's).
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


class CompletionFormat:
    """The response to one HTTP request to /v1/completions.

    Args:
        echo: for each choice, text that stands before its answer.
        with_logprobs: whether the request asked for them.

    Attributes:
        usage: tokens so far; prompts count once, whatever the number of their answers.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Any, model: str, prompt_tokens: int, echo: list[str], with_logprobs: bool) -> None:
        self._tokenizer, self._echo, self._with_logprobs = tokenizer, echo, with_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._prompt_tokens, self._new_tokens = prompt_tokens, 0
        self._emitted = [0] * len(echo)  # tokens of each choice that chunks were made of
        self._offset = [len(text) for text in echo]

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = self._prompt_tokens, self._new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The body of an answer that is not streamed; `results` in the order of the choices."""
        choices = []
        for index, result in enumerate(results):
            self._new_tokens += len(result.token_ids)
            choice = self._choice(index, self._echo[index] + result.text)
            choices.append(choice | {"logprobs": self._logprobs(index, result), "finish_reason": result.finish_reason})
        return self._head | {"object": self.kind, "choices": choices, "usage": self.usage}

    def first(self) -> Iterator[dict[str, Any]]:
        """Chunks before any token."""
        for index, text in enumerate(self._echo):
            if text:
                yield self._chunk(self._delta(index, text))

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk of new text."""
        self._emitted[index] += len(piece.token_ids)
        return self._chunk(self._delta(index, piece.text), logprobs=self._logprobs(index, piece))

    def last(self, index: int, result: Result) -> dict[str, Any]:
        """The chunk that ends a choice; it has the log-probabilities of tokens without text."""
        self._new_tokens += len(result.token_ids)
        rest = slice(self._emitted[index], None)
        piece = Piece("", result.token_ids[rest], result.logprobs[rest], result.top_logprobs[rest])
        logprobs = self._logprobs(index, piece) if piece.token_ids else None
        return self._chunk(self._delta(index, ""), logprobs=logprobs, finish_reason=result.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        return self._head | {"object": self.chunk_kind, "choices": [], "usage": self.usage}

    def _chunk(
        self, choice: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = choice | {"logprobs": logprobs, "finish_reason": finish_reason}
        return self._head | {"object": self.chunk_kind, "choices": [choice]}

    def _decode(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        first = (self._tokenizer.convert_ids_to_tokens(token) or "")[:1]
        return " " + text if first == "\u2581" and text[:1] != " " else text  # SentencePiece drops a first space

    def _token_text(self, token: int) -> str:
        text = self._decode(token)
        # Parts of a character all read the same: the vocabulary's own names differ.
        return (self._tokenizer.convert_ids_to_tokens(token) or text) if _BROKEN in text else text

    def _token_bytes(self, token: int) -> list[int]:
        """Also of a token that is a part of a character."""
        name = self._token_text(token)
        if _BROKEN not in self._decode(token):
            return list(name.encode())
        if len(name) == 6 and name.startswith("<0x"):  # SentencePiece's
            return [int(name[3:5], 16)]
        return [_BYTES[character] for character in name] if _BYTES.keys() >= set(name) else list(name.encode())

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        """One choice of a whole answer, without logprobs and finish_reason."""
        return {"index": index, "text": text}

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        """One choice of a chunk, likewise."""
        return self._choice(index, text)

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The tokens' log-probabilities, if the request asked for them."""
        if not self._with_logprobs:
            return None
        texts = [self._token_text(token) for token in piece.token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset[index])
            self._offset[index] += len(text)
        top = [{self._token_text(token): value for token, value in likeliest} for likeliest in piece.top_logprobs]
        return {"tokens": texts, "token_logprobs": piece.logprobs, "top_logprobs": top, "text_offset": offsets}


class ChatFormat(CompletionFormat):
    """The response to one HTTP request to /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def first(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._echo)):
            yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text}}

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = []
        for token, logprob, likeliest in zip(piece.token_ids, piece.logprobs, piece.top_logprobs, strict=True):
            top = [self._token_entry(other, value) for other, value in likeliest]
            content.append(self._token_entry(token, logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token_text(token), "logprob": logprob, "bytes": self._token_bytes(token)}

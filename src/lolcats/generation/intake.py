"""What an engine can serve: prompts as tokens, and a refusal of those that it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lolcats.generation.params import SamplingParams
from lolcats.generation.runner import Runner
from lolcats.generation.snapshot import Snapshot

Prompt = str | Sequence[int]


class Intake:
    """Encodes and checks prompts for one model. Safe from any thread.

    Args:
        fingerprint: gives the model's fingerprint, for snapshots.
    """

    def __init__(self, tokenizer: Any, runner: Runner, fingerprint: Callable[[], str]) -> None:
        self.tokenizer, self.runner, self.fingerprint = tokenizer, runner, fingerprint
        embedding: Any = runner.model.get_input_embeddings()
        self._vocabulary: int = embedding.weight.shape[0]
        self._tokenizer_lock = threading.Lock()

    def tokens(
        self, prompt: Prompt | None, params: SamplingParams, snapshot: Snapshot | None, special: bool
    ) -> list[int]:
        """All tokens that a request starts from: those of its snapshot, then those of its prompt.

        Raises:
            ValueError: there are none, or one of them or of `stop_token_ids` is outside the vocabulary.
            UserError: a snapshot of another model.
        """
        tokens = [] if prompt is None else self.encode(prompt, special)
        for token in params.stop_token_ids:
            if token >= self._vocabulary:
                raise ValueError(f"stop_token_ids: {token} is outside the vocabulary of {self._vocabulary} tokens")
        if snapshot is not None:
            snapshot.check(self.fingerprint(), self.runner.cache.expected(snapshot.length))
            tokens = snapshot.token_ids + tokens
        if not tokens:
            raise ValueError("the prompt has no tokens; expected at least one")
        return tokens

    def encode(self, prompt: Prompt, special: bool) -> list[int]:
        """See `Engine.encode`."""
        if isinstance(prompt, str):
            with self._tokenizer_lock:  # fast tokenizers refuse two borrowers
                return list(self.tokenizer(prompt, add_special_tokens=special)["input_ids"])
        if not isinstance(prompt, Sequence):
            raise ValueError(f"prompt: expected text or a list of token ids, got {type(prompt).__name__}")
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocabulary:
                raise ValueError(f"prompt: expected token ids from 0 to {self._vocabulary - 1}, got {token!r}")
        return [int(token) for token in prompt]

    def check_length(self, tokens: int, new: int) -> None:
        """Raises ValueError if a sequence of `tokens` and `new` ones does not fit a slot."""
        most = self.runner.max_length
        if most is not None and tokens + new > most:
            raise ValueError(
                f"{tokens} prompt tokens and {new} new ones are more than the {most} that a sequence of this engine"
                " may have, because the model keeps softmax layers; shorten the prompt, lower max_new_tokens, or make"
                " the engine with a larger max_length"
            )

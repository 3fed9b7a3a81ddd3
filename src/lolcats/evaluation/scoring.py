"""Log-likelihoods of continuations, with logits only where they are scored.

A request asks how likely a continuation is after a context. Requests that read the same tokens share a row of a forward
pass: the choices of a question that are one token each, as the letters of MMLU are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lolcats.evaluation.losses import token_losses
from lolcats.generation.decoding import logits_at, pad_left

Score = tuple[float, bool]
"""Sum of log-probabilities (nats), and whether greedy decoding would give exactly these tokens."""
Rows = dict[tuple[int, ...], list[tuple[int, list[int]]]]
"""Tokens that the model reads -> (index of a request, the continuation that ends one token after them)."""

MAX_PADDING = 4096  # tokens in a batch; a smaller batch costs more than these, as far as a GPU is not full
LOGITS_AT_A_TIME = 1 << 29  # elements


class Scorer:
    """Scores continuations with one model.

    Args:
        model: a causal language model in eval mode.
        max_length: most tokens that the model reads.
        batch_size: most rows in a forward pass.
        batch_tokens: most padded tokens in a forward pass.
    """

    def __init__(self, model: Any, *, max_length: int, batch_size: int = 256, batch_tokens: int = 65536) -> None:
        self.model = model
        self.max_length = max_length
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens

    @torch.no_grad()
    def score(
        self, requests: list[tuple[list[int], list[int]]], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Score]:
        """Scores of (context, continuation) pairs of token ids, in their order.

        Like lm-eval, what does not fit is cut from the context's beginning.

        on_progress: called with (requests done, requests in all).
        """
        rows: Rows = {}
        for index, (context, continuation) in enumerate(requests):
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"request {index}: {len(context)} context and {len(continuation)} continuation tokens; expected at"
                    f" least one of each and at most max_length={self.max_length} in the continuation"
                )
            read = (context + continuation)[-self.max_length - 1 : -1]
            rows.setdefault(tuple(read), []).append((index, continuation))
        scores: dict[int, Score] = {}
        for batch in self._batches(rows):
            scores |= self._score_batch(batch, rows)
            if on_progress is not None:
                on_progress(len(scores), len(requests))
        return [scores[index] for index in range(len(requests))]

    def _batches(self, rows: Rows) -> Iterator[list[tuple[int, ...]]]:
        """Rows of similar length, longest first, so that the first batch needs most memory."""
        limit = LOGITS_AT_A_TIME // self.model.get_output_embeddings().weight.shape[0]
        batch: list[tuple[int, ...]] = []
        padding = scored = 0
        for read in sorted(rows, key=len, reverse=True):
            longest, more = len((batch or [read])[0]), sum(len(continuation) for _, continuation in rows[read])
            fits = len(batch) < self.batch_size and (len(batch) + 1) * longest <= self.batch_tokens
            if batch and not (fits and padding + longest - len(read) <= MAX_PADDING and scored + more <= limit):
                yield batch
                batch, padding, scored, longest = [], 0, 0, len(read)
            batch.append(read)
            padding, scored = padding + longest - len(read), scored + more
        if batch:
            yield batch

    def _score_batch(self, batch: list[tuple[int, ...]], rows: Rows) -> dict[int, Score]:
        """Scores by the index of the request."""
        longest, device = len(batch[0]), next(self.model.parameters()).device
        parts = [(row, index, tokens) for row, read in enumerate(batch) for index, tokens in rows[read]]
        # The P positions that are scored, among all B * T, and the token that is wanted after each.
        spots = [place for row, _, tokens in parts for place in range((row + 1) * longest)[-len(tokens) :]]
        spot_P = torch.tensor(spots, device=device)
        wanted_P = torch.tensor([token for *_, tokens in parts for token in tokens], device=device)
        ids_BT, mask_BT = pad_left([list(read) for read in batch], device)
        padded = {"attention_mask": mask_BT, "position_ids": (mask_BT.cumsum(1) - 1).clamp_min(0)}
        with logits_at(self.model, spot_P):
            extra = padded if len(batch[-1]) < longest else {}
            logits_PV = self.model(input_ids=ids_BT, use_cache=False, **extra).logits[0]
        losses = torch.cat(token_losses(logits_PV, wanted_P)).tolist()
        greedy = (logits_PV.argmax(-1) == wanted_P).tolist()
        scores, begin = {}, 0
        for _, index, tokens in parts:
            part = slice(begin, begin := begin + len(tokens))
            scores[index] = (-sum(losses[part]), all(greedy[part]))
        return scores

"""Log-likelihoods of continuations, with everything that requests share computed once.

A request asks how likely a continuation is after a context. Three things are shared: the beginning of many
contexts (the five examples of an MMLU subject), the context of one question's choices, and the context's own
logits, which score every first token of its continuations. A linearized model carries a state of constant size
from one to the next; a softmax model its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lolcats.errors import UserError
from lolcats.evaluation.cache import fork
from lolcats.evaluation.cache import has_constant_state
from lolcats.evaluation.cache import new_cache
from lolcats.evaluation.cache import prefill
from lolcats.evaluation.grouping import Group
from lolcats.evaluation.grouping import Question
from lolcats.evaluation.grouping import batches
from lolcats.evaluation.grouping import by_context
from lolcats.evaluation.grouping import by_stem

Score = tuple[float, bool]
"""Sum of log-probabilities (nats), and whether greedy decoding would give exactly these tokens."""

LOGITS_AT_A_TIME = 1 << 27  # elements; bounds the memory of continuation logits


@dataclass
class _Part:
    """A continuation of more than one token, while it is scored."""

    row: int
    index: int
    tokens: list[int]
    score: float
    greedy: bool


class Scorer:
    """Scores continuations with one model.

    Args:
        model: a causal language model in eval mode.
        max_length: most tokens that the model reads.
        batch_size: most contexts in a forward pass; halved where memory does not suffice.
        batch_tokens: most padded tokens in a forward pass.
        min_stem, min_saved: see `by_stem`.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        batch_size: int = 128,
        batch_tokens: int = 65536,
        min_stem: int = 64,
        min_saved: int = 4096,
    ) -> None:
        self.model = model
        self.max_length = max_length
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        self.min_stem, self.min_saved = min_stem, min_saved
        self.device = next(model.parameters()).device
        self.tokens_computed = 0
        """Tokens that went through the model so far, padding excluded."""

    @torch.no_grad()
    def score(
        self, requests: list[tuple[list[int], list[int]]], on_progress: Callable[[int], None] | None = None
    ) -> list[Score]:
        """Scores of (context, continuation) pairs of token ids, in their order.

        on_progress: called with the number of requests just finished.

        Raises:
            UserError: a single question does not fit into memory.
        """
        results: list[Score] = [(0.0, False)] * len(requests)
        questions = by_context(requests, self.max_length)
        for group in by_stem(questions, min_stem=self.min_stem, min_saved=self.min_saved):
            stem_cache = self._stem(group)
            # Every row of a softmax model copies the stem's keys and values.
            stem_cost = 0 if has_constant_state(self.model) else group.stem
            for batch in batches(group.questions, group.stem, self.batch_size, self.batch_tokens, stem_cost):
                self._score(stem_cache, group.stem, batch, results, on_progress)
        return results

    def _stem(self, group: Group) -> Any:
        if group.stem == 0:
            return None
        self.tokens_computed += group.stem
        ids = torch.tensor([group.questions[0].context[: group.stem]], device=self.device)
        return prefill(self.model, ids)[1]

    def _score(
        self,
        stem_cache: Any,
        stem: int,
        batch: list[Question],
        results: list[Score],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        """Score a batch; in halves if memory does not suffice."""
        try:
            scores = self._score_batch(stem_cache, stem, batch)
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                raise UserError(
                    f"out of memory with a single context of {len(batch[0].context)} tokens: use a smaller model,"
                    " another dtype or a larger device"
                ) from error
            scores = None
        if scores is None:  # outside of the except block, which would keep the failed tensors alive
            torch.cuda.empty_cache()
            middle = len(batch) // 2
            self.batch_size = max(1, middle)
            for half in (batch[:middle], batch[middle:]):
                self._score(stem_cache, stem, half, results, on_progress)
            return
        for index, score in scores.items():
            results[index] = score
        if on_progress is not None:
            on_progress(len(scores))

    def _score_batch(self, stem_cache: Any, stem: int, batch: list[Question]) -> dict[int, Score]:
        rests = [question.context[stem:] for question in batch]
        longest = max(map(len, rests))
        ids_BT = self._tensor([(0,) * (longest - len(rest)) + rest for rest in rests])
        real_BT = self._tensor([[0] * (longest - len(rest)) + [1] * len(rest) for rest in rests])
        mask_BK = torch.cat([real_BT.new_ones(len(batch), stem), real_BT], dim=1)
        needs_cache = any(len(tokens) > 1 for question in batch for _, tokens in question.continuations)
        cache = None
        if stem_cache is not None:
            cache = fork(stem_cache, torch.zeros(len(batch), dtype=torch.int64, device=self.device))
        elif needs_cache:
            cache = new_cache(self.model)
        logits_BTV = self._forward(ids_BT, mask_BK, stem + (real_BT.cumsum(1) - 1).clamp_min(0), cache, keep=1)
        self.tokens_computed += sum(map(len, rests))

        log_p_BV = logits_BTV[:, -1].float().log_softmax(-1)
        pairs = [(row, index, tokens) for row, question in enumerate(batch) for index, tokens in question.continuations]
        rows, first = self._tensor([row for row, _, _ in pairs]), self._tensor([tokens[0] for _, _, tokens in pairs])
        values = log_p_BV[rows, first].tolist()
        greedy = (log_p_BV.argmax(-1)[rows] == first).tolist()
        parts = [_Part(*pair, *scored) for pair, scored in zip(pairs, zip(values, greedy, strict=True), strict=True)]
        self._add_further_tokens(cache, mask_BK, stem, rests, [part for part in parts if len(part.tokens) > 1])
        return {part.index: (part.score, part.greedy) for part in parts}

    def _add_further_tokens(
        self, cache: Any, mask_BK: Tensor, stem: int, rests: list[tuple[int, ...]], parts: list[_Part]
    ) -> None:
        """Add the log-probabilities of all tokens but the first of each continuation."""
        parts = sorted(parts, key=lambda part: -len(part.tokens))
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        while parts:
            width = len(parts[0].tokens) - 1
            most = max(1, min(4 * self.batch_size, LOGITS_AT_A_TIME // (width * vocabulary)))
            now, parts = parts[:most], parts[most:]
            rows_N = self._tensor([part.row for part in now])
            fed = [part.tokens[:-1] for part in now]
            ids_NT = self._tensor([tokens + [0] * (width - len(tokens)) for tokens in fed])
            real_NT = self._tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in fed])
            wanted_NT = self._tensor([part.tokens[1:] + [0] * (width - len(part.tokens) + 1) for part in now])
            start_N1 = self._tensor([[stem + len(rests[part.row])] for part in now])
            mask_NK = torch.cat([mask_BK[rows_N], real_NT], dim=1)
            positions_NT = start_N1 + torch.arange(width, device=self.device)
            logits_NTV = self._forward(ids_NT, mask_NK, positions_NT, fork(cache, rows_N), keep=0)
            self.tokens_computed += int(real_NT.sum())
            scores, greedy = _continuation_scores(logits_NTV, wanted_NT, real_NT.bool())
            for part, score, flag in zip(now, scores.tolist(), greedy.tolist(), strict=True):
                part.score, part.greedy = part.score + score, part.greedy and flag

    def _forward(self, ids_BT: Tensor, mask_BK: Tensor, positions_BT: Tensor, cache: Any, keep: int) -> Tensor:
        padded = not bool(mask_BK.all())
        return self.model(
            input_ids=ids_BT,
            attention_mask=mask_BK if padded else None,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        ).logits

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _continuation_scores(logits_NTV: Tensor, wanted_NT: Tensor, real_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Per row: sum of the wanted tokens' log-probabilities, and whether each is the likeliest."""
    values_NT = torch.zeros(real_NT.shape, device=real_NT.device)
    likeliest_NT = torch.ones_like(real_NT)
    values, likeliest = [], []
    wanted_M = wanted_NT[real_NT]
    # float32 whatever the model's type is: bfloat16 sums would tie answers that differ.
    for part_MV, part_M in zip(logits_NTV[real_NT].split(2048), wanted_M.split(2048), strict=True):
        part_MV = part_MV.float()
        values.append(part_MV.gather(1, part_M[:, None])[:, 0] - part_MV.logsumexp(-1))
        likeliest.append(part_MV.argmax(-1) == part_M)
    values_NT[real_NT] = torch.cat(values)
    likeliest_NT[real_NT] = torch.cat(likeliest)
    return values_NT.sum(1), likeliest_NT.all(1)

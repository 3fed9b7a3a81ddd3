"""Log-likelihoods of continuations, with everything that requests share computed once.

A request asks how likely a continuation is after a context. Two things are shared: the context of one question's
choices, and the context's own logits, which score every first token of its continuations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lolcats.errors import UserError
from lolcats.evaluation.losses import token_losses
from lolcats.generation.decoding import logits_at, new_cache
from lolcats.modeling.compat import CACHE

Score = tuple[float, bool]
"""Sum of log-probabilities (nats), and whether greedy decoding would give exactly these tokens."""

Item = TypeVar("Item")
MAX_PADDING = 4096  # tokens in a batch; a smaller batch costs more than these, as far as a GPU is not full
LOGITS_AT_A_TIME = 1 << 29  # elements; bounds the memory of continuation logits


@dataclass
class Question:
    """One context and all continuations that are scored after it.

    Attributes:
        context: token ids, at least one.
        continuations: (index of the request, its token ids).
    """

    context: tuple[int, ...]
    continuations: list[tuple[int, list[int]]] = field(default_factory=list)


class _Part(NamedTuple):
    """A continuation of more than one token, while it is scored."""

    place: int  # among all continuations of the batch
    row: int  # of its context in the batch
    tokens: list[int]


class Scorer:
    """Scores continuations with one model.

    Args:
        model: a causal language model in eval mode.
        max_length: most tokens that the model reads.
        batch_size: most contexts in a forward pass; halved where memory does not suffice.
        batch_tokens: most padded tokens in a forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        batch_size: int = 256,
        batch_tokens: int = 65536,
    ) -> None:
        self.model = model
        self.max_length = max_length
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def score(
        self, requests: list[tuple[list[int], list[int]]], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Score]:
        """Scores of (context, continuation) pairs of token ids, in their order.

        on_progress: called with (requests done, requests in all).

        Raises:
            UserError: a single question does not fit into memory.
        """
        found: list[tuple[list[int], Tensor]] = []  # on the device: waiting for a batch would leave it without work
        done, questions = 0, by_context(requests, self.max_length)
        limits = {"rows": self.batch_size, "tokens": self.batch_tokens}
        todo = batches(questions, lambda question: len(question.context), **limits)[::-1]
        while todo:
            batch = todo.pop()
            scored = self._try_batch(batch)
            if scored is None:
                middle = len(batch) // 2
                todo += [batch[middle:], batch[:middle]]
                continue
            found.append(scored)
            done += len(scored[0])
            if on_progress is not None:
                on_progress(done, len(requests))
        results: list[Score] = [(0.0, False)] * len(requests)
        for indices, values_3P in found:
            for index, first, others, greedy in zip(indices, *values_3P.tolist(), strict=True):
                results[index] = (first + others, bool(greedy))
        return results

    def _try_batch(self, batch: list[Question]) -> tuple[list[int], Tensor] | None:
        """`_score_batch`; None if memory does not suffice, or did not for as many before."""
        if len(batch) > self.batch_size:
            return None
        try:
            return self._score_batch(batch)
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                raise UserError(
                    f"out of memory with a single context of {len(batch[0].context)} tokens: use a smaller model,"
                    " another dtype or a larger device"
                ) from error
        torch.cuda.empty_cache()  # outside of the except block, which would keep the failed tensors alive
        self.batch_size = len(batch) // 2
        return None

    def _score_batch(self, batch: list[Question]) -> tuple[list[int], Tensor]:
        """Indices of the batch's P requests, and float32 [3, P]: log-probability of the first token; of all others;
        whether all are the likeliest."""
        contexts = [question.context for question in batch]
        longest = max(map(len, contexts))
        ids_BT = self._tensor([(0,) * (longest - len(context)) + context for context in contexts])
        padding_B1 = self._tensor([[longest - len(context)] for context in contexts])
        columns_T = torch.arange(longest, device=self.device)
        mask_BT = (columns_T >= padding_B1).long()
        needs_cache = any(len(tokens) > 1 for question in batch for _, tokens in question.continuations)
        cache = new_cache(self.model) if needs_cache else None
        mask = mask_BT if any(len(context) < longest for context in contexts) else None
        logits_BTV = self._forward(ids_BT, mask, (columns_T - padding_B1).clamp_min(0), cache, keep=1)

        log_p_BV = logits_BTV[:, -1].float().log_softmax(-1)
        pairs = [(row, index, tokens) for row, question in enumerate(batch) for index, tokens in question.continuations]
        rows_P, first_P = self._tensor([[row for row, _, _ in pairs], [tokens[0] for _, _, tokens in pairs]])
        greedy_P = log_p_BV.argmax(-1)[rows_P] == first_P
        values_P = log_p_BV[rows_P, first_P]
        values_3P = torch.stack([values_P, torch.zeros_like(values_P), greedy_P.to(values_P.dtype)])
        longer = [_Part(place, row, tokens) for place, (row, _, tokens) in enumerate(pairs) if len(tokens) > 1]
        self._add_further_tokens(cache, mask_BT, list(map(len, contexts)), longer, values_3P)
        return [index for _, index, _ in pairs], values_3P

    def _add_further_tokens(
        self, cache: Any, mask_BK: Tensor, starts: list[int], parts: list[_Part], values_3P: Tensor
    ) -> None:
        """Put into `values_3P` what all tokens but the first of each continuation give.

        starts: tokens of each row's context.
        """
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        limit = min(self.batch_tokens, LOGITS_AT_A_TIME // vocabulary)
        for now in batches(parts, lambda part: len(part.tokens) - 1, rows=4 * self.batch_size, tokens=limit):
            width = len(now[0].tokens) - 1
            ids_NT = self._tensor([part.tokens[:-1] + [0] * (width - len(part.tokens) + 1) for part in now])
            facts = [(part.place, part.row, starts[part.row], len(part.tokens) - 1) for part in now]
            place_N, row_N, start_N, length_N = self._tensor(facts).unbind(1)
            columns_T = torch.arange(width, device=self.device)
            # The M spots of [N, T] that are no padding, and the token that is wanted after each.
            spots = [row * width + column for row, part in enumerate(now) for column in range(len(part.tokens) - 1)]
            spot_M, wanted_M = self._tensor([spots, [token for part in now for token in part.tokens[1:]]])
            full = len(spots) == len(now) * width and all(starts[part.row] == mask_BK.shape[1] for part in now)
            mask_NK = torch.cat([mask_BK[row_N], (columns_T < length_N[:, None]).long()], dim=1)
            positions_NT = start_N[:, None] + columns_T
            with logits_at(self.model, spot_M):
                logits_1MV = self._forward(ids_NT, None if full else mask_NK, positions_NT, fork(cache, row_N), keep=0)
            scores_M = -torch.cat(token_losses(logits_1MV[0], wanted_M))
            likeliest_M = (logits_1MV[0].argmax(-1) == wanted_M).to(scores_M.dtype)
            sums_NT = scores_M.new_zeros(len(now) * width).index_copy(0, spot_M, scores_M).view(len(now), width)
            flags_NT = scores_M.new_ones(len(now) * width).index_copy(0, spot_M, likeliest_M).view(len(now), width)
            values_3P[1, place_N] = sums_NT.sum(1)
            values_3P[2, place_N] *= flags_NT.amin(1)

    def _forward(self, ids_BT: Tensor, mask_BK: Tensor | None, positions_BT: Tensor, cache: Any, keep: int) -> Tensor:
        return self.model(
            input_ids=ids_BT,
            attention_mask=mask_BK,
            position_ids=positions_BT,
            use_cache=cache is not None,
            logits_to_keep=keep,
            **{CACHE: cache},
        ).logits

    def _tensor(self, values: Any) -> Tensor:
        """Integers on the model's device; from pinned memory, since copies from other memory wait for the GPU."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def fork(cache: Any, rows: Tensor) -> Any:
    """A cache whose row i is row `rows[i]` of `cache`, which stays as it is.

    Works for key/value layers and for linear states alike: both replace their tensors when rows are picked.

    Args:
        rows: [N] int64 on any device; rows may repeat.
    """
    forked = copy.copy(cache)
    forked.layers = []
    for layer in cache.layers:
        picked: Any
        if isinstance(layer, CacheLayerMixin):
            picked = copy.copy(layer)
            picked.batch_select_indices(rows)
        else:  # writes into its tensors, and has no other way to pick rows
            picked = copy.deepcopy(layer)
            picked.reorder_cache(rows)
        forked.layers.append(picked)
    return forked


def by_context(requests: Iterable[tuple[list[int], list[int]]], max_length: int) -> list[Question]:
    """Requests (context, continuation) by context.

    Like lm-eval, what does not fit is cut from the context's beginning: the model reads at most `max_length`
    tokens, the last one of the continuation not among them.
    """
    questions: dict[tuple[int, ...], Question] = {}
    for index, (context, continuation) in enumerate(requests):
        room = max_length + 1 - len(continuation)
        if not context or not continuation or room < 1:
            raise ValueError(
                f"request {index}: {len(context)} context and {len(continuation)} continuation tokens; expected at"
                f" least one of each and at most max_length={max_length} in the continuation"
            )
        key = tuple(context[-room:])
        questions.setdefault(key, Question(key)).continuations.append((index, continuation))
    return list(questions.values())


def batches(items: Iterable[Item], length: Callable[[Item], int], *, rows: int, tokens: int) -> list[list[Item]]:
    """Batches of similar length, longest first, so that the first one needs most memory.

    Args:
        length: tokens of an item.
        rows: most items in a batch.
        tokens: most padded tokens in a batch.
    """
    result: list[list[Item]] = []
    longest = padding = 0
    for item in sorted(items, key=length, reverse=True):
        padding += longest - length(item)
        room = result and len(result[-1]) < rows and (len(result[-1]) + 1) * longest <= tokens
        if room and padding <= MAX_PADDING:
            result[-1].append(item)
        else:
            result.append([item])
            longest, padding = length(item), 0
    return result

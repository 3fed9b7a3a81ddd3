"""Log-likelihoods of continuations, with everything that requests share computed once.

A request asks how likely a continuation is after a context. Three things are shared: the beginning of many
contexts (the five examples of an MMLU subject), the context of one question's choices, and the context's own
logits, which score every first token of its continuations. A linearized model carries a state of constant size
from one to the next; a softmax model its keys and values.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lolcats.errors import UserError
from lolcats.evaluation.grouping import Group, Question, batches, by_context, by_stem
from lolcats.evaluation.losses import token_losses
from lolcats.generation.decoding import logits_at, new_cache, prefill
from lolcats.modeling.cache import recurrent_layers
from lolcats.modeling.compat import CACHE

Score = tuple[float, bool]
"""Sum of log-probabilities (nats), and whether greedy decoding would give exactly these tokens."""

LOGITS_AT_A_TIME = 1 << 29  # elements; bounds the memory of continuation logits


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
        min_saved: see `by_stem`.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        batch_size: int = 256,
        batch_tokens: int = 65536,
        min_saved: int = 4096,
    ) -> None:
        self.model = model
        self.max_length = max_length
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        # padding after a stem would change the states of recurrent layers, which may be padded at the start alone
        self.min_saved = sys.maxsize if recurrent_layers(model.config) else min_saved
        self.device = next(model.parameters()).device
        self.tokens_computed = 0
        """Tokens that went through the model so far, padding excluded."""

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
        for group in by_stem(questions, min_saved=self.min_saved):
            stem_cache = None
            if group.stem > 0:
                self.tokens_computed += group.stem
                stem_cache = prefill(self.model, self._tensor([group.questions[0].context[: group.stem]]))[1]
            todo = self._batches(group)[::-1]
            while todo:
                batch = todo.pop()
                scored = self._try_batch(stem_cache, group.stem, batch)
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

    def _batches(self, group: Group) -> list[list[Question]]:
        return batches(
            group.questions,
            lambda question: len(question.context) - group.stem,
            rows=self.batch_size,
            tokens=self.batch_tokens,
            extra=0 if has_constant_state(self.model) else group.stem,  # of keys and values, copied for each row
        )

    def _try_batch(self, stem_cache: Any, stem: int, batch: list[Question]) -> tuple[list[int], Tensor] | None:
        """`_score_batch`; None if memory does not suffice, or did not for as many before."""
        if len(batch) > self.batch_size:
            return None
        try:
            return self._score_batch(stem_cache, stem, batch)
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                raise UserError(
                    f"out of memory with a single context of {len(batch[0].context)} tokens: use a smaller model,"
                    " another dtype or a larger device"
                ) from error
        torch.cuda.empty_cache()  # outside of the except block, which would keep the failed tensors alive
        self.batch_size = len(batch) // 2
        return None

    def _score_batch(self, stem_cache: Any, stem: int, batch: list[Question]) -> tuple[list[int], Tensor]:
        """Indices of the batch's P requests, and float32 [3, P]: log-probability of the first token; of all others;
        whether all are the likeliest."""
        rests = [question.context[stem:] for question in batch]
        longest = max(map(len, rests))
        ids_BT = self._tensor([(0,) * (longest - len(rest)) + rest for rest in rests])
        padding_B1 = self._tensor([[longest - len(rest)] for rest in rests])
        columns_T = torch.arange(longest, device=self.device)
        mask_BK = torch.cat([ids_BT.new_ones(len(batch), stem), (columns_T >= padding_B1).long()], dim=1)
        needs_cache = any(len(tokens) > 1 for question in batch for _, tokens in question.continuations)
        cache = None
        if stem_cache is not None:
            cache = fork(stem_cache, torch.zeros(len(batch), dtype=torch.int64, device=self.device))
        elif needs_cache:
            cache = new_cache(self.model)
        mask = mask_BK if any(len(rest) < longest for rest in rests) else None
        logits_BTV = self._forward(ids_BT, mask, stem + (columns_T - padding_B1).clamp_min(0), cache, keep=1)
        self.tokens_computed += sum(map(len, rests))

        log_p_BV = logits_BTV[:, -1].float().log_softmax(-1)
        pairs = [(row, index, tokens) for row, question in enumerate(batch) for index, tokens in question.continuations]
        rows_P, first_P = self._tensor([[row for row, _, _ in pairs], [tokens[0] for _, _, tokens in pairs]])
        greedy_P = log_p_BV.argmax(-1)[rows_P] == first_P
        values_P = log_p_BV[rows_P, first_P]
        values_3P = torch.stack([values_P, torch.zeros_like(values_P), greedy_P.to(values_P.dtype)])
        longer = [_Part(place, row, tokens) for place, (row, _, tokens) in enumerate(pairs) if len(tokens) > 1]
        self._add_further_tokens(cache, mask_BK, [stem + len(rest) for rest in rests], longer, values_3P)
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
            self.tokens_computed += len(spots)
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


def has_constant_state(model: Any) -> bool:
    """Whether no layer of `model` keeps keys and values of the whole past."""
    return hasattr(model, "linear_layers") and not model.config.has_exact_heads

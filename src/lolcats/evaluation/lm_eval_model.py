"""The lm-eval model `LolcatsLM`: lm-eval's Hugging Face adapter that reads choices of one token once, and generates
with the engine.

Tokenisation and truncation are those of lm-eval's `hf` model, so that results agree with it within rounding.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch.nn.utils.rnn import pad_sequence

from lolcats.evaluation.perplexity import token_losses
from lolcats.generation.decoding import logits_at
from lolcats.generation.engine import Engine, slots_in_memory
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling.model import LolcatsForCausalLM

BATCH_TOKENS = 65536  # in a forward pass, padding included

Score = tuple[float, bool]
"""Sum of log-probabilities (nats), and whether greedy decoding would give exactly these tokens."""


class LolcatsLM(HFLM):
    """Any causal language model, linearized or not.

    Args:
        pretrained: a model, or what `AutoModelForCausalLM.from_pretrained` takes.
        batch_size: most contexts in a forward pass, and most answers that are generated at a time.
        on_progress: called with (requests done, requests in all).
        kwargs: as for lm-eval's `hf` model.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        batch_size: int = 256,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained=pretrained, batch_size=batch_size, **kwargs)
        self.on_progress = on_progress

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        """Scores of (texts, context, continuation), in their order; what is too long loses its beginning.

        Requests that read the same tokens share a row of a forward pass, as the choices of a question do that are one
        token each, and there are logits only where they are scored.
        """
        rows: dict[tuple[int, ...], list[tuple[int, list[int]]]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"request {index}: {len(context)} context and {len(continuation)} continuation tokens; expected at"
                    f" least one of each and at most max_length={self.max_length} in the continuation"
                )
            rows[tuple((context + continuation)[-self.max_length - 1 : -1])].append((index, continuation))
        scores: dict[int, Score] = {}
        for batch in self._batches(rows):
            scores |= self._score({read: rows[read] for read in batch})
            self.on_progress(len(scores), len(requests))
        return [scores[index] for index in range(len(requests))]

    def _batches(self, rows: dict[tuple[int, ...], Any]) -> Iterator[list[tuple[int, ...]]]:
        """Rows of similar length, longest first, so that the first batch needs most memory."""
        waiting = sorted(rows, key=len, reverse=True)
        while waiting:
            size = min(self.batch_size, max(1, BATCH_TOKENS // len(waiting[0])))
            yield waiting[:size]
            waiting = waiting[size:]

    def _score(self, rows: dict[tuple[int, ...], list[tuple[int, list[int]]]]) -> dict[int, Score]:
        """Scores of one batch by the index of the request; padding on the right is never seen."""
        ids_BT = pad_sequence([torch.tensor(read) for read in rows], batch_first=True).to(self.device)
        places: list[int] = []
        wanted: list[int] = []
        ends = {}
        for row, read in enumerate(rows):
            for index, tokens in rows[read]:
                end = row * ids_BT.shape[1] + len(read)
                places += range(end - len(tokens), end)
                wanted += tokens
                ends[index] = len(wanted) - len(tokens), len(wanted)
        wanted_P = torch.tensor(wanted, device=self.device)
        with logits_at(self.model, torch.tensor(places, device=self.device)):
            logits_PV = self.model(input_ids=ids_BT, use_cache=False).logits[0]
        losses = token_losses(logits_PV, wanted_P).tolist()
        greedy = (logits_PV.argmax(-1) == wanted_P).tolist()
        return {index: (-sum(losses[begin:end]), all(greedy[begin:end])) for index, (begin, end) in ends.items()}

    @property
    def max_gen_toks(self) -> int:
        """Of a task that names no number; lm-eval's 256 cut worked answers of chat models."""
        return 512

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers by the engine, longest sequences first; through `generate()` of a model that it does not run."""
        if not isinstance(self.model, LolcatsForCausalLM):
            return super().generate_until(requests, disable_tqdm=True)
        by_length = defaultdict(list)
        for index, request in enumerate(requests):
            context, options = request.args
            options = normalize_gen_kwargs(options, self.max_gen_toks)
            new = min(options["max_gen_toks"], self.max_length // 2)
            sampling = {name: options[name] for name in ("temperature", "top_p", "top_k") if name in options}
            stop = tuple(text for text in options["until"] if text)
            params = SamplingParams(max_new_tokens=new, stop=stop, seed=index, **sampling)
            prompt = self.tok_encode(context)[new - self.max_length :]
            length = min(max(2048, 1 << (len(prompt) + new - 1).bit_length()), self.max_length)
            by_length[length].append((index, (prompt, params)))
        answers: dict[int, str] = {}
        for length, group in sorted(by_length.items(), reverse=True):
            slots = slots_in_memory(self.model, length, min(self.batch_size, len(group)))
            engine = Engine(self.model, self.tokenizer, max_slots=slots, max_length=length, prefill_chunk=4096)
            for index, result in engine.as_completed(group, refuse=True):
                answers[index] = result.text
                self.on_progress(len(answers), len(requests))
            engine.shutdown()
            del engine
            gc.collect()
            torch.cuda.empty_cache()  # `slots_in_memory` asks what is free
        return [answers[index] for index in range(len(requests))]

"""The lm-eval model type `lolcats`: lm-eval's Hugging Face adapter with shared contexts computed once.

Importing this module registers the type; then `lm_eval.simple_evaluate(model="lolcats", ...)` knows it.
Tokenisation and truncation are those of lm-eval's `hf` model, so that results agree with it within rounding. What
differs is how log-likelihoods are computed (`lolcats.evaluation.scoring`), how many texts are tokenised at a time, and
that the engine generates.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs

from lolcats.data.packing import parallel_tokenizer
from lolcats.evaluation.scoring import Score, Scorer
from lolcats.generation.engine import Engine, slots_in_memory
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling.model import LolcatsForCausalLM

REQUESTS_AT_A_TIME = 4096  # tokenised together; bounds the memory for their texts


@register_model("lolcats")
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
        batch_size: int | str = 256,
        on_progress: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        rows = 256 if str(batch_size).startswith("auto") else int(batch_size)
        super().__init__(pretrained=pretrained, batch_size=rows, **kwargs)
        self.on_progress = on_progress
        self.scorer = Scorer(self.model, max_length=self.max_length, batch_size=rows)
        self._encoded: dict[str, list[int]] = {}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        """Scores of (context, continuation) texts, in their order."""
        if self.enable_thinking:
            raise ValueError("enable_thinking=True: log-likelihoods are those of the answers alone; leave it out")
        tokens = []
        for begin in range(0, len(requests), REQUESTS_AT_A_TIME):
            pairs = [request.args for request in requests[begin : begin + REQUESTS_AT_A_TIME]]
            self._encode_ahead(pairs)
            tokens += [(pair, *self._tokens(*pair)) for pair in pairs]
        self._encoded = {}
        return self._loglikelihood_tokens(tokens, disable_tqdm=disable_tqdm)

    def _tokens(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            return self._encode_pair(context, continuation)
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens[0] == self.prefix_token_id:
            return tokens[:1], tokens[1:]
        return [self.prefix_token_id], tokens

    def _encode_ahead(self, pairs: list[tuple[str, str]]) -> None:
        """Tokenise on all cores what `_encode_pair` will ask for, but texts that begin with a begin token."""
        begin_text = self.tokenizer.decode(self.prefix_token_id)
        kept = [(context, end) for context, end in pairs if context and not has_bos_prefix(context, begin_text)]
        texts = list(dict.fromkeys(text for context, end in kept for text in (context.rstrip(), context + end)))
        options = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        if texts:
            with parallel_tokenizer():
                found = self.tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]
            self._encoded = dict(zip(texts, found, strict=True))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, *args: Any, **kwargs: Any) -> list[int]:
        if add_special_tokens is None and not args and not kwargs and string in self._encoded:
            return self._encoded[string]
        return super().tok_encode(string, add_special_tokens, *args, **kwargs)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        return self.scorer.score([(context, continuation) for _, context, continuation in requests], self.on_progress)

    @property
    def max_gen_toks(self) -> int:
        """Of a task that names no number; lm-eval's 256 cut worked answers of chat models."""
        return 512

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers by the engine, longest sequences first; through `generate()` of a model that it does not run."""
        if not isinstance(self.model, LolcatsForCausalLM):
            return super().generate_until(requests, disable_tqdm=disable_tqdm or self.on_progress is not None)
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
                if self.on_progress is not None:
                    self.on_progress(len(answers), len(requests))
            engine.shutdown()
            del engine
            gc.collect()
            torch.cuda.empty_cache()  # `slots_in_memory` asks what is free
        return [answers[index] for index in range(len(requests))]

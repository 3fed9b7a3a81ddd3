"""The lm-eval model type `lolcats`: lm-eval's Hugging Face adapter with shared contexts computed once.

Importing this module registers the type; then `lm_eval.simple_evaluate(model="lolcats", ...)` knows it.
Tokenisation, truncation and generation are those of lm-eval's `hf` model, so that results agree with it within
rounding. What differs is how log-likelihoods are computed (`lolcats.evaluation.scoring`) and how many texts are
tokenised at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix

from lolcats.data.packing import parallel_tokenizer
from lolcats.evaluation.scoring import Score, Scorer

TokenisedPairs = dict[tuple[str, str], tuple[list[int], list[int]]]

REQUESTS_AT_A_TIME = 4096  # tokenised together; bounds the memory for their texts


@register_model("lolcats")
class LolcatsLM(HFLM):
    """Any causal language model, linearized or not.

    Args:
        pretrained: a model, or what `AutoModelForCausalLM.from_pretrained` takes.
        batch_size: most contexts in a forward pass.
        on_progress: called with (requests done, requests in all).
        tokenised: (context, continuation) -> their tokens; filled here, for other models with the same tokenizer.
        kwargs: as for lm-eval's `hf` model.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        batch_size: int | str = 256,
        on_progress: Callable[[int, int], None] | None = None,
        tokenised: TokenisedPairs | None = None,
        **kwargs: Any,
    ) -> None:
        rows = 256 if str(batch_size).startswith("auto") else int(batch_size)
        super().__init__(pretrained=pretrained, batch_size=rows, **kwargs)
        self.on_progress = on_progress
        self.scorer = Scorer(self.model, max_length=self.max_length, batch_size=rows)
        self.tokenised: TokenisedPairs = {} if tokenised is None else tokenised
        self._encoded: dict[str, list[int]] = {}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        """Scores of (context, continuation) texts, in their order."""
        if self.enable_thinking:
            raise ValueError("enable_thinking=True: log-likelihoods are those of the answers alone; leave it out")
        new = list(dict.fromkeys(request.args for request in requests if request.args not in self.tokenised))
        for begin in range(0, len(new), REQUESTS_AT_A_TIME):
            pairs = new[begin : begin + REQUESTS_AT_A_TIME]
            self._encode_ahead(pairs)
            self.tokenised.update((pair, self._tokens(*pair)) for pair in pairs)
        self._encoded = {}
        tokens = [(request.args, *self.tokenised[request.args]) for request in requests]
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

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """lm-eval's generation in batches, through `generate()` and the model's own cache."""
        return super().generate_until(requests, disable_tqdm=disable_tqdm or self.on_progress is not None)

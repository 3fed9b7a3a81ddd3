"""The lm-eval model type `lolcats`: lm-eval's Hugging Face adapter with shared contexts computed once.

Importing this module registers the type; then `lm_eval.simple_evaluate(model="lolcats", ...)` knows it.
Tokenisation, truncation and generation are those of lm-eval's `hf` model, so that results agree with it within
rounding. What differs is how log-likelihoods are computed (`lolcats.evaluation.scoring`) and how many texts are
tokenised at a time.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix

from lolcats.data.packing import parallel_tokenizer
from lolcats.evaluation.scoring import Score, Scorer

TokenisedPairs = dict[tuple[str, str], tuple[list[int], list[int]]]

Encode = Callable[[list[str]], list[list[int]]]
Cuts = tuple[int, ...]
"""Places in a text, growing, where it may be cut."""

MIN_TEXTS = 3  # fewer texts, or a shorter beginning, are not worth the attempt
MIN_CHARACTERS = 64


# Requests tokenised together; bounds the memory for texts that occur in several of them.
REQUESTS_AT_A_TIME = 4096


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
        """Tokenise the texts that `_encode_pair` will ask for, all at once on all cores."""
        texts: dict[str, Cuts] = {}
        for context, continuation in pairs:
            if context:
                cuts = cuts_of(context.rstrip())
                texts[context.rstrip()] = texts[context + continuation] = cuts
        known = {text: self._encoded[text] for text in texts if text in self._encoded}
        prefix = self.tokenizer.decode(self.prefix_token_id)
        options = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        inside = functools.partial(self._encode_batch, add_special_tokens=False)
        for has_bos in (False, True):
            batch = {
                text: cuts
                for text, cuts in texts.items()
                if text not in known and bool(has_bos_prefix(text, prefix)) == has_bos
            }
            known |= encode_texts(
                batch, inside if has_bos else functools.partial(self._encode_batch, **options), inside
            )
        self._encoded = known

    def _encode_batch(self, texts: list[str], **options: bool) -> list[list[int]]:
        if not texts:
            return []
        with parallel_tokenizer():
            return self.tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, *args: Any, **kwargs: Any) -> list[int]:
        if add_special_tokens is None and not args and not kwargs and string in self._encoded:
            return self._encoded[string]
        return super().tok_encode(string, add_special_tokens, *args, **kwargs)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if self.on_progress is not None:
                self.on_progress(done, len(requests))

        return self.scorer.score([(context, continuation) for _, context, continuation in requests], advance)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """lm-eval's generation in batches, through `generate()` and the model's own cache."""
        return super().generate_until(requests, disable_tqdm=disable_tqdm or self.on_progress is not None)


# --- beginnings that texts share, tokenised once ------------------------------------------------------------------
#
# Thousands of few-shot prompts begin with the same examples, and all choices of a question with its context. Tokenizers
# split a text into words before all else, so that a text cut in front of a word has the tokens of its two parts. Each
# beginning is tried out on one text: a tokenizer that works otherwise (a mark in front of each text, a special token
# behind it) costs some time, not the result.


def cuts_of(context: str) -> Cuts:
    """Cuts for all texts that begin with this prompt: within its last example, and within its question.

    The cuts are in front of a word that all these texts have, so that its surroundings, by which tokenizers split, are
    the same in all of them.
    """
    places = [_last_word(context, context.rfind("\n\n")), _last_word(context, len(context))]
    return tuple(place for place in places if place > 0)


def _last_word(text: str, end: int) -> int:
    """Where the last word before `end` begins, with the one space before it; 0: there is none."""
    place = text.rfind(" ", 0, max(end, 0))
    if place <= 0 or text[place - 1].isspace() or text[place + 1 : place + 2].isspace():
        return 0
    return place


def encode_texts(texts: Mapping[str, Cuts], encode: Encode, encode_inside: Encode) -> dict[str, list[int]]:
    """Each text's tokens, as `encode` gives them for the whole text.

    Args:
        texts: with the places where each may be cut; one place serves several texts.
        encode: tokens of texts, with the special tokens that begin them.
        encode_inside: tokens of pieces from inside of texts.
    """
    if not any(texts.values()):
        return dict(zip(texts, encode(list(texts)), strict=True))
    groups: dict[str, list[str]] = defaultdict(list)
    for text, cuts in texts.items():
        groups[text[: cuts[0]] if cuts else ""].append(text)
    shared = {head: group for head, group in groups.items() if len(head) >= MIN_CHARACTERS and len(group) >= MIN_TEXTS}
    alone = [text for head, group in groups.items() for text in (group[:1] if head in shared else group)]
    tails = {
        text[len(head) :]: tuple(cut - len(head) for cut in texts[text][1:])
        for head, group in shared.items()
        for text in group
    }
    tail_tokens = encode_texts(tails, encode_inside, encode_inside)
    tokens = encode_texts({text: texts[text][1:] for text in alone}, encode, encode_inside)
    refused: list[str] = []
    for head, group in shared.items():
        tried = tokens[group[0]]
        end = tail_tokens[group[0][len(head) :]]
        if tried[-len(end) :] == end:
            beginning = tried[: -len(end)]
            tokens.update((text, beginning + tail_tokens[text[len(head) :]]) for text in group[1:])
        else:
            refused += group[1:]
    tokens.update(zip(refused, encode(refused), strict=True))
    return tokens

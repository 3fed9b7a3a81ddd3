"""RULER (arXiv:2404.06654) as lm-eval generates it, without a network and with any tokenizer.

lm-eval downloads essays to hide its needles in, and a model to find the ends of their sentences. Here the essays are
any natural text, and sentences end where a full stop, question or exclamation mark is followed by a space. The two
question-answering tasks of RULER need data sets of their own and are not among these.
"""

from __future__ import annotations

import functools
import io
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np

from lolcats.data.retrieval import haystack_text
from lolcats.errors import UserError

RULER_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
)
METRIC = "recall"
_GENERATORS = ("generate_samples", "sys_vartrack_w_noise_random", "sys_word_pair_random", "sys_kwext")


def ruler_rows(
    definition: dict[str, Any], tokenizer: Any, length: int, *, samples: int, seed: int, haystack: str
) -> list[dict[str, Any]]:
    """Rows of one task.

    Args:
        definition: lm-eval's, read from its file.
        length: tokens of prompt and answer.
        haystack: data source of natural text, see `RetrievalWriter`; its last fifth is used.

    Raises:
        UserError: the task does not fit into `length` tokens.
    """
    generate = definition["custom_dataset"]
    random.seed(f"{seed} {length}")
    np.random.seed([seed, length])  # what the generators draw from
    with _offline(generate, tokenizer, samples, _words(haystack, seed)):
        try:
            return list(generate(max_seq_lengths=[length])["test"])
        except ValueError as error:
            raise UserError(f"{definition['task']} does not fit into {length} tokens: {error}") from error


def ruler_changes(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What to change in a task's definition so that it is measured on `rows`, with one metric for every length."""
    return {
        "custom_dataset": lambda **_: {"test": rows},
        "process_results": _share_found,
        "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
    }


def _share_found(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of a row's answers that occur in what the model wrote, as RULER counts them."""
    text = results[0].lower()
    return {METRIC: sum(answer.lower() in text for answer in row["outputs"]) / len(row["outputs"])}


@functools.lru_cache(maxsize=4)
def _words(haystack: str, seed: int) -> list[str]:
    """The test split's words, beginning somewhere else for each seed."""
    words = haystack_text(haystack, "test").split()
    begin = int(np.random.default_rng(seed).integers(len(words)))
    return words[begin:] + words[:begin]


@contextmanager
def _offline(generate: Callable[..., Any], tokenizer: Any, samples: int, words: list[str]) -> Iterator[None]:
    """Give lm-eval's generator what it would download, and let it write only so many rows, silently."""
    from lm_eval.tasks.ruler import prepare_niah

    names = generate.__globals__

    def essays(type_haystack: str) -> Any:
        return words if type_haystack == "essay" else prepare_niah.get_haystack(type_haystack=type_haystack)

    changed: dict[str, Any] = {"get_tokenizer": lambda *_, **__: tokenizer, "get_haystack": essays}
    for name in _GENERATORS:
        if name in names:
            changed[name] = _writing(names[name], samples)
    before = {name: names[name] for name in changed if name in names}
    tokenize = prepare_niah.cached_sent_tokenize
    names.update({name: value for name, value in changed.items() if name in before})
    prepare_niah.cached_sent_tokenize = _sentences
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # counts and bars
            yield
    finally:
        names.update(before)
        prepare_niah.cached_sent_tokenize = tokenize


def _writing(generator: Callable[..., Any], samples: int) -> Callable[..., Any]:
    """`generator` with another number of samples, unless it writes the one example of a prompt."""

    @functools.wraps(generator)
    def write(*args: Any, num_samples: int = 500, **options: Any) -> Any:
        return generator(*args, num_samples=min(samples, num_samples), **options)

    return write


@functools.lru_cache(maxsize=64)
def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)

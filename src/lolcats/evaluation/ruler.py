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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from lolcats.data.retrieval import PASSKEY_FILLER, haystack_text
from lolcats.errors import UserError

RULER_TASKS = (
    *(f"niah_{kind}_{number}" for kind in ("single", "multikey") for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe"),
)
METRIC = "recall"
_GENERATORS = ("generate_samples", "sys_vartrack_w_noise_random", "sys_word_pair_random", "sys_kwext")


def ruler_tasks(
    tokenizer: Any, *, lengths: Sequence[int], samples: int, seed: int, haystack: str = "demo"
) -> dict[tuple[str, int], Any]:
    """lm-eval's tasks by name and length, each with one metric, the share of a text's answers that is found."""
    from lm_eval.api.task import ConfigurableTask

    tasks = {}
    for name in RULER_TASKS:
        definition = _definition(name)
        generate = definition["custom_dataset"]
        for length in lengths:
            given = {"get_tokenizer": lambda *_, **__: tokenizer, "RNG": random.Random(f"{seed} {length}")}
            with _offline(generate, given, samples, _words(haystack)):
                random.seed(f"{seed} {length}")
                np.random.seed([seed, length])  # what the generators draw from
                try:
                    _check_room(name, generate, tokenizer, length)
                    rows = generate(max_seq_lengths=[length])
                except ValueError as error:
                    raise UserError(f"{name} does not fit into {length} tokens: {error}") from error
            changes = {
                "task": f"{name}_{length}",
                "custom_dataset": lambda rows=rows, **_: rows,
                "process_results": _share_found,
                "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
                "num_fewshot": 0,
            }
            tasks[name, length] = ConfigurableTask(config=definition | changes)
    return tasks


def check_ruler() -> None:
    """Raises UserError where lm-eval, or what its RULER needs, is not installed."""
    _definition(RULER_TASKS[0])


def _check_room(name: str, generate: Callable[..., Any], tokenizer: Any, length: int) -> None:
    """Raises ValueError where lm-eval would try for ever, or ask for nothing: not even its smallest text fits."""
    smallest = {"ruler_vt": (10, 1, 4), "ruler_cwe": (10, length)}.get(name)
    if smallest is None:
        return
    *texts, answer = generate.__globals__["generate_input_output"](*smallest)
    whole, noise = (len(tokenizer(text)["input_ids"]) for text in (f"{texts[0]} {answer}", PASSKEY_FILLER * 5))
    if name == "ruler_vt" and whole - noise > 500 - 30:
        raise ValueError("with this tokenizer its example takes more than the 500 that it may, at any length")
    needed = len(tokenizer(" ".join(texts))["input_ids"]) + {"ruler_vt": 30 + 550, "ruler_cwe": 120}[name]
    if needed >= length:  # answer and example included
        raise ValueError(f"with this tokenizer its smallest text takes {needed}")


def _share_found(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of a row's answers that occur in what the model wrote, as RULER counts them."""
    text = results[0].lower()
    return {METRIC: sum(answer.lower() in text for answer in row["outputs"]) / len(row["outputs"])}


@functools.cache
def _definition(name: str) -> dict[str, Any]:
    """lm-eval's definition of a task, with the functions that it names."""
    try:
        import lm_eval.tasks
        import nltk
        from lm_eval.tasks._yaml_loader import load_yaml  # lm-eval is pinned, and has no public way to do this

        with patch.object(nltk, "download"), redirect_stdout(io.StringIO()):  # sentences are found without its model
            file = Path(lm_eval.tasks.__file__).parent / "ruler" / f"{name.removeprefix('ruler_')}.yaml"
            return load_yaml(file, resolve_func=True)
    except ImportError as error:
        raise UserError(f"RULER needs lm-eval and its extra ({error}): pip install 'lolcats[eval]'") from error


@functools.lru_cache(maxsize=4)
def _words(haystack: str) -> list[str]:
    return haystack_text(haystack, "test").split()


@contextmanager
def _offline(generate: Callable[..., Any], given: dict[str, Any], samples: int, words: list[str]) -> Iterator[None]:
    """Give lm-eval's generator what it would download or keep, and let it write only so many rows, silently."""
    from lm_eval.tasks.ruler import prepare_niah

    names, fill, haystacks = generate.__globals__, prepare_niah.generate_input_output, prepare_niah.get_haystack

    def essays(type_haystack: str) -> Any:
        return words if type_haystack == "essay" else haystacks(type_haystack=type_haystack)

    def write(num_haystack: int, haystack: Any, *args: Any, type_haystack: str, **options: Any) -> Any:
        if type_haystack == "essay":  # each text begins at another place
            begin = random.randrange(max(1, len(words) - num_haystack))
            haystack = words[begin : begin + num_haystack]
        return fill(num_haystack, haystack, *args, type_haystack=type_haystack, **options)

    changed: dict[str, Any] = given | {"get_haystack": essays}
    changed |= {name: _writing(names[name], samples) for name in _GENERATORS if name in names}
    with (
        patch.dict(names, {name: value for name, value in changed.items() if name in names}),
        patch.multiple(prepare_niah, cached_sent_tokenize=_sentences, generate_input_output=write),
        redirect_stdout(io.StringIO()),  # counts
        redirect_stderr(io.StringIO()),  # bars
    ):
        yield


def _writing(generator: Callable[..., Any], samples: int) -> Callable[..., Any]:
    """`generator` with another number of samples, unless it writes the one example of a prompt."""

    @functools.wraps(generator)
    def write(*args: Any, num_samples: int = 500, **options: Any) -> Any:
        return generator(*args, num_samples=min(samples, num_samples), **options)

    return write


@functools.lru_cache(maxsize=64)
def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)

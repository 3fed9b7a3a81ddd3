"""Synthetic retrieval in natural text: facts, tables and copies in which something is to be found again.

One writer serves training data (paths "retrieval" and "passkey"), the choice of exact heads, and `lolcats eval --tasks
recall,passkey`. Its two splits share nothing: "train" and "test" have other templates, other words and other parts of
the haystack; of passkeys, whose text is the paper's, other numbers.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from lolcats.config import DataSource
from lolcats.data.packed import PackedDataset, fingerprint
from lolcats.data.sources import DEMO_EVALUATION, detect_format, open_source
from lolcats.errors import UserError

Split = Literal["train", "test"]
STREAMS = {"train": 3, "test": 4}  # first number of every seed
TEST_SHARE = 5  # one part in so many of the haystack and of the words is for tests

KINDS = ("needle", "needles", "phone_book", "pairs", "copy_100", "copy_400", "copy_900")
"""needle: one fact in text; needles: four, one of which is asked for; phone_book, pairs: six look-ups in a table that
fills the text; copy_N: N random tokens of the haystack, once more."""
FACTS = "facts_8"  # all of them asked for, one after another
HAYSTACK_CHARACTERS = 20_000_000  # of the text around, which are enough for more texts than anyone trains on
PIECE = 100_000  # characters
# arXiv:2410.10254, listing "Passkey Retrieval Prompt Template", after arXiv:2305.16300.
PASSKEY_TASK = (
    "There is an important piece of info hidden inside a lot of irrelevant text. Find it and memorize it."
    " I will quiz you about the important information there.\n"
)
PASSKEY_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
PASSKEY_FACT = "\nThe pass key is {0}. Remember it. {0} is the pass key.\n"
PASSKEY_QUESTION = "\nWhat is the pass key? The pass key is"
COPY_PREFIX = 4  # tokens of a copy that show what is being copied, and are no answers
LOOK_UPS = 6
MOST_LABELS = 256
PLAIN: dict[str, Any] = {"add_special_tokens": False, "verbose": False}  # of a tokenizer's call


TEMPLATES: dict[str, dict[str, Any]] = {
    "train": {
        "facts": (
            ("Whoever asks for {0} gets {1}.", "What does one get? Whoever asks for {0} gets"),
            ("Remember that the key of {0} is {1}.", "Tell me the key of {0}. The key of {0} is"),
            ("{0} was assigned to {1}.", "What was assigned to what? {0} was assigned to"),
        ),
        "phone_book": ("Table of codes", "{0}: {1}", "{0}:"),
        "pairs": ("Some words belong together.", "{0} -> {1}", "{0} ->"),
    },
    "test": {
        "facts": (
            ("Note: the password for room {0} is {1}.", "What opens room {0}? The password for room {0} is"),
            (
                "In the archive, {0} is filed under {1}.",
                "Where is it in the archive? In the archive, {0} is filed under",
            ),
            ("They agreed to call {0} by the name {1}.", "What did they agree on? They agreed to call {0} by the name"),
        ),
        "phone_book": ("Phone numbers of the members", "{0} ({1})", "{0} ("),
        "pairs": ("A list of partners, one pair a line.", "{0} with {1}", "{0} with"),
    },
}
"""Wordings of a split: facts with the question after them; headline, entry and query of the two tables."""


@dataclass(frozen=True)
class Sample:
    """A text of tokens in which some are answers.

    Attributes:
        token_ids: [T] int32.
        answer: [T] int32, the number of the answer that a token belongs to, counted from 0; -1: none.
        source: [T] int32, the number of the answer that a token is the source of: where the answer stands in the text
            before; -1: none.
    """

    token_ids: np.ndarray
    answer: np.ndarray
    source: np.ndarray


class RetrievalWriter:
    """Writes samples of an exact length in tokens.

    Args:
        haystack: a data source of plain text with a column "text"; "demo": the text shipped with the package.
        begin_token: begin samples with the tokenizer's begin token, if it begins texts so.
    """

    def __init__(self, tokenizer: Any, split: Split, haystack: str = "demo", *, begin_token: bool = False) -> None:
        self.tokenizer, self.split = tokenizer, split
        begin = [tokenizer.bos_token_id] if begin_token and begins_texts(tokenizer) else []
        self.begin = np.array(begin, dtype=np.int32)
        self.templates = TEMPLATES[split]
        self.words = _common_words(split)
        self.haystack = haystack

    @cached_property
    def text(self) -> np.ndarray:
        """Tokens of the haystack."""
        return _haystack_tokens(self.tokenizer, self.haystack, self.split)

    def write(self, kind: str, length: int, seed: int, index: int) -> Sample:
        """Sample `index` of a kind: `KINDS`, "passkey"; of N facts one asked for: "needles_N", or all: "facts_N"."""
        draw = np.random.default_rng([STREAMS[self.split], seed, length, index, zlib.crc32(kind.encode())])
        room = length - len(self.begin)
        sample = self._passkey(draw, room, index) if kind == "passkey" else self._write(kind, draw, room)
        none = np.full_like(self.begin, -1)
        numbers = (np.insert(part, 0, none) for part in (sample.answer, sample.source))
        return Sample(np.insert(sample.token_ids, 0, self.begin), *numbers)

    def write_any(self, length: int, seed: int, index: int) -> Sample:
        """A sample of a random kind: half of them facts, one to eight; a quarter tables; a quarter copies."""
        draw = np.random.default_rng([STREAMS[self.split], seed, length, index])
        kinds = ["needle", "needle", "needles_2", "needles_4", "needles_8"]
        group = draw.integers(4)
        if group == 2:
            kinds = ["phone_book", "pairs"]
        elif group == 3:
            kinds = [f"copy_{draw.integers(length // 16, length // 2 - length // 16)}"]
        return self.write(str(draw.choice(kinds)), length, seed, index)

    def _write(self, kind: str, draw: np.random.Generator, length: int) -> Sample:
        name, _, count = kind.partition("_")
        if name == "copy":
            return self._copy(draw, length, int(count))
        if name == "facts":
            return self._needles(draw, length, int(count), int(count))
        if name in ("needle", "needles"):
            return self._needles(draw, length, int(count) if count else {"needle": 1, "needles": 4}[name])
        if kind in ("phone_book", "pairs"):
            return self._table(draw, length, kind)
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")

    def _needles(self, draw: np.random.Generator, length: int, count: int, asked: int = 1) -> Sample:
        names = self._draw_words(draw, count)
        values = [  # numbers of 5 to 7 digits, or three words
            str(draw.integers(10_000, 10_000_000)) if draw.integers(2) else " ".join(self._draw_words(draw, 3))
            for _ in names
        ]
        fact, question = self.templates["facts"][draw.integers(len(self.templates["facts"]))]
        facts = [self._encode(f"\n{fact.format(*pair)}\n") for pair in zip(names, values, strict=True)]
        questions = [self._encode("\n" + question.format(name)) for name in names[:asked]]
        answers = [self._encode(f" {value}") for value in values[:asked]]  # what follows is the model's own choice
        text = self.text_of(draw, length - sum(map(len, (*facts, *questions, *answers))))
        cuts = np.sort(draw.integers(0, len(text) + 1, count))
        parts: list[np.ndarray] = []
        order = draw.permutation(count)
        for place, part in zip(order, np.split(text, cuts)[:-1], strict=True):
            parts += [part, facts[place]]
        sources = [2 * int(place) + 1 for place in np.argsort(order)[:asked]]
        return _joined([*parts, text[cuts[-1] :]], answers, sources, questions)

    def _passkey(self, draw: np.random.Generator, length: int, index: int) -> Sample:
        """A number in the paper's filler, in turn for each tenth of depth."""
        number, depth = draw.integers(10_000, 100_000), (index % 10 + draw.random()) / 10
        parts = [self._encode(text.format(number)) for text in (PASSKEY_TASK, PASSKEY_FACT, PASSKEY_QUESTION)]
        answer = self._encode(f" {number}")
        room = length - sum(map(len, parts)) - len(answer)
        before = self._filler(round(depth * room))
        return _joined([parts[0], before, parts[1], self._filler(room - len(before)), parts[2]], [answer], [2])

    def _filler(self, count: int) -> np.ndarray:
        """So many tokens, from the first sentence on."""
        _check_room(count)
        return _filler_tokens(self.tokenizer, 1 + count // 16)[:count]  # its five sentences are more tokens than 16

    def _table(self, draw: np.random.Generator, length: int, kind: str) -> Sample:
        headline, entry, query = self.templates[kind]
        header = self._encode(f"{headline}\n")
        keys = self._draw_words(draw, min(length // 6, len(self.words)))
        values = self._draw_words(draw, len(keys))
        if kind == "phone_book":
            values = [str(value) for value in draw.integers(10_000, 1_000_000, len(keys))]
        pairs = list(zip(keys, values, strict=True))
        entries = self.tokenizer([f"{entry.format(*pair)}\n" for pair in pairs], **PLAIN)["input_ids"]
        sizes = np.cumsum([len(ids) for ids in entries])
        rows = int(np.searchsorted(sizes, length - len(header) - LOOK_UPS * 32, side="right"))
        if rows < 2 * LOOK_UPS:
            raise UserError(f"{kind}: {length} tokens hold {rows} entries, expected {2 * LOOK_UPS}; raise the length")
        questions, answers, sources = [], [], []
        for number in draw.choice(rows * 3 // 4, LOOK_UPS, replace=False):
            asked = self._encode("\n" + query.format(pairs[number][0]))
            whole = self._encode("\n" + entry.format(*pairs[number]))
            shared = next(
                (place for place, pair in enumerate(zip(asked, whole, strict=False)) if pair[0] != pair[1]), len(asked)
            )
            questions.append(whole[:shared])
            answers.append(whole[shared:])
            sources.append(2 + int(number))  # after text and header
        parts = [header, *(np.array(ids, np.int32) for ids in entries[:rows])]
        missing = length - sum(map(len, parts)) - sum(map(len, questions)) - sum(map(len, answers))
        return _joined([self.text_of(draw, missing), *parts], answers, sources, questions)

    def _copy(self, draw: np.random.Generator, length: int, count: int) -> Sample:
        copied = self.text[draw.integers(0, len(self.text), count)]
        text = self.text_of(draw, length - 2 * count)
        answers = list(copied[COPY_PREFIX:, None])
        before = [text, copied[:COPY_PREFIX], *answers, copied[:COPY_PREFIX]]
        return _joined(before, answers, list(range(2, 2 + len(answers))))

    def _draw_words(self, draw: np.random.Generator, count: int) -> list[str]:
        return [self.words[place] for place in draw.choice(len(self.words), count, replace=False)]

    def text_of(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """So many consecutive tokens of the haystack."""
        _check_room(count)
        if count > len(self.text):
            raise UserError(
                f"the haystack has {len(self.text)} tokens for the {self.split} split, expected {count}; give more text"
            )
        start = int(draw.integers(0, len(self.text) - count + 1))
        return self.text[start : start + count]

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, **PLAIN)["input_ids"], dtype=np.int32)


def retrieval_dataset(
    tokenizer: Any, haystack: str, *, count: int, length: int, seed: int, first: int = 0, kind: str | None = None
) -> PackedDataset:
    """Texts for the choice of exact heads: four of five ask for something, in the fifth all tokens are labels.

    Args:
        count: sequences, of `length` tokens each; at most `MOST_LABELS` of a sequence are labels.
        first: number of the first; others are other texts.
        kind: of all of them; None: as said.
    """
    writer = RetrievalWriter(tokenizer, "train", haystack, begin_token=True)
    ids_NT = np.empty((count, length), np.int32)
    labels_NT = np.zeros((count, length), bool)
    for row, number in enumerate(range(first, first + count)):
        draw = np.random.default_rng([STREAMS["train"], seed, length, number, 0])
        if kind is not None or draw.integers(5):
            sample = (
                writer.write_any(length, seed, number) if kind is None else writer.write(kind, length, seed, number)
            )
            ids_NT[row], places = sample.token_ids, np.flatnonzero(sample.answer >= 0)
        else:
            text = writer.text_of(draw, length - len(writer.begin))
            ids_NT[row], places = np.insert(text, 0, writer.begin), np.arange(1, length)
        labels_NT[row, draw.permutation(places)[:MOST_LABELS]] = True
    info = {"sequences": count, "fingerprint": fingerprint(ids_NT, labels_NT)}
    return PackedDataset(ids_NT, labels_NT, info=info)


def begins_texts(tokenizer: Any) -> bool:
    """Whether a tokenizer begins texts with its begin token."""
    begin = tokenizer.bos_token_id
    return begin is not None and tokenizer("x", verbose=False)["input_ids"][:1] == [begin]


def haystack_text(haystack: str, split: Split) -> str:
    """The split's part of all text of a data source: the last fifth for tests; of "demo" the rows of evaluations."""
    source = DataSource(path=haystack, format="text")
    rows = open_source(source).rows()
    detect_format(source, list(rows.column_names))
    if haystack == "demo":
        kept = range(DEMO_EVALUATION) if split == "test" else range(DEMO_EVALUATION, len(rows))
        return "\n\n".join(rows.select(kept)["text"])
    text = "\n\n".join(rows["text"])
    border = len(text) - len(text) // TEST_SHARE
    return text[border:] if split == "test" else text[:border]


@lru_cache(maxsize=2)  # both stages and the gates ask for the same
def _haystack_tokens(tokenizer: Any, haystack: str, split: Split) -> np.ndarray:
    text = haystack_text(haystack, split)[:HAYSTACK_CHARACTERS]
    pieces = [text[begin : begin + PIECE] for begin in range(0, len(text), PIECE)]  # which are encoded in parallel
    encoded = tokenizer(pieces, **PLAIN)["input_ids"]
    tokens = np.concatenate([np.array(ids, dtype=np.int32) for ids in encoded])
    tokens.flags.writeable = False
    return tokens


def _check_room(tokens: int) -> None:
    if tokens < 0:
        raise UserError(f"a retrieval text does not fit: {-tokens} tokens are missing; raise the length")


@lru_cache(maxsize=8)
def _filler_tokens(tokenizer: Any, repeats: int) -> np.ndarray:
    return np.array(tokenizer(PASSKEY_FILLER * repeats, **PLAIN)["input_ids"], np.int32)


def _joined(
    before: list[np.ndarray], answers: list[np.ndarray], sources: list[int], questions: list[np.ndarray] | None = None
) -> Sample:
    """Text, then each answer after its question; answer n stands in part `sources[n]` of the text."""
    parts = [(ids, -1) for ids in before]
    for number, answer in enumerate(answers):
        if questions is not None:
            parts.append((questions[number], -1))
        parts.append((answer, number))
    answer = np.repeat(np.array([number for _, number in parts], np.int32), [len(ids) for ids, _ in parts])
    source = np.full_like(answer, -1)
    begins = np.cumsum([0, *map(len, before)])
    for number, part in enumerate(sources):
        # not always all of the answer: a token at its border may also hold what stands beside it
        pair = before[part].tolist(), answers[number].tolist()
        place, size = 0, len(pair[0])
        if pair[0] != pair[1]:
            place, _, size = SequenceMatcher(None, *pair, autojunk=False).find_longest_match()
        source[begins[part] + place :][:size] = number
    return Sample(np.concatenate([ids for ids, _ in parts]).astype(np.int32), answer, source)


@cache
def _common_words(split: Split) -> list[str]:
    """The split's plain words of four to eight letters, those in the shipped text three times or more, in order."""
    counts: Counter[str] = Counter()
    for text in open_source(DataSource(path="demo")).rows()["text"]:
        counts.update(re.findall(r"\b[a-z]{4,8}\b", text))
    common = sorted(word for word, count in counts.items() if count >= 3)
    return [word for word in common if (zlib.crc32(word.encode()) % TEST_SHARE == 0) == (split == "test")]

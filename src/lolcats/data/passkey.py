"""Passkey retrieval: a five-digit number hidden in filler text, to be repeated at the end.

The text is that of arXiv:2410.10254, listing "Passkey Retrieval Prompt Template", which follows Mohtashami and
Jaggi, arXiv:2305.16300. One sample is a number, a depth and a length in tokens; the text is made from these by
whoever has a tokenizer. So the same samples serve as evaluation and, under the data path "passkey", as training
data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lolcats.data.templates import Document, Template
from lolcats.errors import UserError

TASK = (
    "There is an important piece of info hidden inside a lot of irrelevant text. Find it and memorize it."
    " I will quiz you about the important information there."
)
FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NEEDLE = "The pass key is {passkey}. Remember it. {passkey} is the pass key."
QUESTION = "What is the pass key? The pass key is"
TRAINING_SAMPLES = 10_000  # as many as the paper trains on
TRAINING_STREAM, EVALUATION_STREAM = 1, 2  # first number of every seed, so that the two draw different passkeys


@dataclass(frozen=True)
class PasskeySample:
    """A prompt and its answer.

    Attributes:
        prompt: text that ends in the question.
        answer: " 12345", the text to follow it.
        tokens: tokens of the prompt, without special tokens.
        depth: share of the filler that stands before the passkey, 0 to 1.
    """

    prompt: str
    answer: str
    tokens: int
    depth: float


def draw(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows {passkey, depth}: uniform five-digit numbers at uniform depths.

    Row i depends on the seed and on i alone, so that a longer list begins with a shorter one.
    """
    rows = []
    for index in range(count):
        generator = np.random.default_rng([TRAINING_STREAM, seed, index])
        rows.append({"passkey": int(generator.integers(10_000, 100_000)), "depth": float(generator.random())})
    return rows


def compose(passkey: int, depth: float, sentences: int) -> str:
    """The prompt with `sentences` sentences of filler, `depth` (0 to 1) of them before the passkey."""
    before = round(depth * sentences)
    # The filler starts anew after the passkey, as in the paper's listing.
    parts = [TASK, _filler(before), NEEDLE.format(passkey=passkey), _filler(sentences - before), QUESTION]
    return "\n".join(part for part in parts if part)


class PasskeyWriter:
    """Writes prompts of a length in tokens of one tokenizer.

    Args:
        add_special_tokens: count the special tokens that the tokenizer puts around a text.
    """

    def __init__(self, tokenizer: Any, add_special_tokens: bool = False) -> None:
        self.tokenizer = tokenizer
        self.add_special_tokens = add_special_tokens
        short, long = self.count(compose(12345, 0.5, 100)), self.count(compose(12345, 0.5, 200))
        self._tokens_per_sentence = (long - short) / 100

    def count(self, text: str) -> int:
        encoded = self.tokenizer(text, add_special_tokens=self.add_special_tokens, verbose=False)
        return len(encoded["input_ids"])

    def write(self, passkey: int, depth: float, length: int) -> PasskeySample:
        """The longest prompt whose tokens and whose answer's tokens together are at most `length`.

        Raises:
            UserError: not even a prompt without filler fits.
        """
        answer = f" {passkey}"
        room = length - len(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
        least = self.count(compose(passkey, depth, 0))
        sentences = max(0, round((room - least) / self._tokens_per_sentence))
        tokens = self.count(compose(passkey, depth, sentences))
        while tokens > room and sentences > 0:
            excess = int((tokens - room) / self._tokens_per_sentence)
            sentences = max(0, sentences - max(1, excess))
            tokens = self.count(compose(passkey, depth, sentences))
        while (more := self.count(compose(passkey, depth, sentences + 1))) <= room:
            sentences, tokens = sentences + 1, more
        if tokens > room:
            raise UserError(
                f"a passkey text needs at least {least + length - room} tokens with this tokenizer, and {length} were"
                " asked for: raise the length"
            )
        return PasskeySample(compose(passkey, depth, sentences), answer, tokens, depth)


def template(tokenizer: Any, sequence_length: int) -> Template:
    """Rows of `draw` as documents of exactly `sequence_length` tokens, labels on the passkey at the end.

    What is missing to the length stands before the text, as end-of-sequence tokens, so that packing cuts no
    document in two.
    """
    writer = PasskeyWriter(tokenizer)
    eos = tokenizer.eos_token
    fills = (
        eos is not None and tokenizer(eos * 2, add_special_tokens=False)["input_ids"] == [tokenizer.eos_token_id] * 2
    )

    def build(row: dict[str, Any]) -> list[Document]:
        sample = writer.write(row["passkey"], row["depth"], sequence_length - 1)
        answer = len(tokenizer(sample.answer, add_special_tokens=False)["input_ids"])
        missing = sequence_length - 1 - answer - sample.tokens
        segments = [(sample.prompt, False), (sample.answer, True)]
        return [Document([(eos * missing, False), *segments] if fills and missing else segments)]

    return build


def _filler(sentences: int) -> str:
    return " ".join(FILLER[index % len(FILLER)] for index in range(sentences))

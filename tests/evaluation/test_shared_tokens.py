"""Sharing beginnings changes no token, whatever the tokenizer does."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lolcats.evaluation.lm_eval_model import encode_texts, shared_head

WORDS = ["river", "stone", "the", "cloud's", "42", "7,000", "moon.", "iron,", "(copper)", "Zürich", "日本", "e.g."]
DRAW = random.Random(3)
# Words before digits, as Llama 3 splits; line breaks stay with the punctuation before them.
LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def words(count: int) -> str:
    return " ".join(DRAW.choices(WORDS, k=count))


def question() -> str:
    return f"{words(8)}?\n" + "".join(f"{letter}. {words(2)}{DRAW.choice(['', ' ', '.'])}\n" for letter in "ABCD")


EXAMPLES = ["".join(f"{question()}Answer: {letter}\n\n" for letter in "ACBD") for _ in range(3)]
CONTEXTS = [f"{examples}{question()}Answer:" for examples in EXAMPLES for _ in range(6)]
CONTEXTS += [f"{EXAMPLES[0]} indented {words(4)}:", f"{EXAMPLES[0]}\n\n{words(2)}:", words(40), "short", "a\n\nb c"]
PAIRS = [(context, f" {end}") for context in CONTEXTS for end in ("A", "B", words(3), "\n")]


def byte_level(pattern: str | None = None) -> Tokenizer:
    plain = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    plain.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    plain.train_from_iterator([context for context, _ in PAIRS], trainer)
    return plain


def with_ends(template: str) -> Tokenizer:
    plain = byte_level()
    plain.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<bos>", plain.token_to_id("<bos>")), ("<eos>", plain.token_to_id("<eos>"))]
    )
    return plain


def marked() -> Tokenizer:
    """A mark in front of each text and for each space, and merges over the whole text: Llama 2, Mistral."""
    plain = Tokenizer(models.BPE(unk_token="<unk>"))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])
    plain.train_from_iterator([line for context, _ in PAIRS for line in context.splitlines()], trainer)
    return plain


def across_words() -> Tokenizer:
    """One word may hold a space: cutting in front of a word cuts some tokens."""
    plain = byte_level()
    plain.add_tokens([AddedToken("Answer: A", normalized=False), AddedToken("Answer: D", normalized=False)])
    return plain


TOKENIZERS = {
    "gpt-2": byte_level,
    "llama-3": lambda: byte_level(LLAMA_3),
    "bos": lambda: with_ends("<bos> $A"),
    "eos": lambda: with_ends("$A <eos>"),
    "marked": marked,
    "across-words": across_words,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_whole_texts(name):
    tokenizer, characters = TOKENIZERS[name](), 0

    def encode(texts: list[str], inside: bool) -> list[list[int]]:
        nonlocal characters
        characters += sum(map(len, texts))
        return [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=not inside)]

    heads = {text: shared_head(context) for context, end in PAIRS for text in (context, context + end)}
    expected = dict(zip(heads, encode(list(heads), False), strict=True))
    whole, characters = characters, 0
    assert encode_texts(heads, encode) == expected
    if name in ("gpt-2", "llama-3", "bos"):
        assert characters < whole / 3
    if name in ("eos", "marked"):  # nothing can be shared
        assert characters > whole


def test_heads_end_in_front_of_words():
    assert shared_head("One: two\n\nThree four\n\nFive: six seven?\nAnswer:") == "One: two\n\nThree"
    for context in ("no examples here", "word", "", " word\n\nx", "two  spaces\n\nx", "one \n\nx"):
        assert shared_head(context) == ""

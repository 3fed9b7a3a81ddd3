"""Text from tokens, piece by piece."""

import random

import pytest
from transformers import AutoTokenizer

from lolcats.generation.request import Detokenizer, StopStrings

TEXTS = ["plain", "naïve café", "日本語 text", "🙂🙃 x 👩‍👩‍👧", "a\n\nb\tc", " leading and  double "]


def pieces(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_without_broken_characters(tokenizer, text):
    found = pieces(tokenizer, tokenizer(text)["input_ids"])
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)
    assert len([piece for piece in found if piece]) == len(text)  # each character as soon as it is whole


def test_words_get_their_spaces(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert pieces(tokenizer, tokenizer("w1 w2 w3")["input_ids"]) == ["w1", " w2", " w3", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "passed", "found"),
    [
        ("abc STOP def", ["STOP"], "abc ", "STOP"),
        ("abc STO def", ["STOP"], "abc STO def", None),
        ("aaab", ["aab"], "a", "aab"),
        ("one two", ["two", "one two"], "", "one two"),
        ("xab", ["ab", "xabc"], "x", "ab"),
        ("ends with ST", ["STOP"], "ends with ST", None),
        ("any", [], "any", None),
        ("日本語", ["本"], "日", "本"),
    ],
)
def test_stop_strings(size, text, stops, passed, found):
    stop = StopStrings(stops)
    out = []
    for begin in range(0, len(text), size):
        out.append(stop.push(text[begin : begin + size]))
        # never more than what is certain
        assert passed.startswith("".join(out))
        if stop.found is not None:
            break
    assert "".join(out) + stop.finish() == passed
    assert stop.found == found
    if found is not None:
        assert stop.push("more") == ""


RANDOM = random.Random(0).choices(range(260), k=2000)


@pytest.mark.parametrize("tokens", [[128] * 2000, [256] * 2000, RANDOM], ids=["broken", "special", "random"])
def test_work_per_token_does_not_grow(tokenizer, tokens):
    """Also where no text ever becomes certain, and where tokens have none; the pieces join to the tokenizer's text."""

    class Counting:
        decoded = 0

        def decode(self, tokens, **options):
            self.decoded += len(tokens)
            return tokenizer.decode(tokens, **options)

    counting = Counting()
    assert "".join(pieces(counting, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert counting.decoded < 100 * len(tokens)

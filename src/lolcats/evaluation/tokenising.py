"""Tokens of many prompts, with the beginnings that they share tokenised once.

Thousands of few-shot prompts begin with the same examples, and all choices of a question with its context. Tokenizers
split a text into words before all else, so that a text cut in front of a word has the tokens of its two parts. Each
beginning is tried out on one text: a tokenizer that works otherwise (a mark in front of each text, a special token
behind it) costs some time, not the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

Encode = Callable[[list[str]], list[list[int]]]
Cuts = tuple[int, ...]
"""Places in a text, growing, where it may be cut."""

MIN_TEXTS = 3  # fewer texts, or a shorter beginning, are not worth the attempt
MIN_CHARACTERS = 64


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

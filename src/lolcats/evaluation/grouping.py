"""Which scoring requests share tokens: equal contexts, and long common beginnings of different contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

Tokens = tuple[int, ...]
Item = TypeVar("Item")

MAX_PADDING = 4096  # tokens in a batch; a smaller batch costs more than these, as far as a GPU is not full


@dataclass
class Question:
    """One context and all continuations that are scored after it.

    Attributes:
        context: token ids, at least one.
        continuations: (index of the request, its token ids).
    """

    context: Tokens
    continuations: list[tuple[int, list[int]]] = field(default_factory=list)


@dataclass
class Group:
    """Questions whose contexts begin with the same `stem` tokens (0: nothing shared)."""

    stem: int
    questions: list[Question]


def by_context(requests: Iterable[tuple[list[int], list[int]]], max_length: int) -> list[Question]:
    """Requests (context, continuation) by context.

    Like lm-eval, what does not fit is cut from the context's beginning: the model reads at most `max_length`
    tokens, the last one of the continuation not among them.
    """
    questions: dict[Tokens, Question] = {}
    for index, (context, continuation) in enumerate(requests):
        room = max_length + 1 - len(continuation)
        if not context or not continuation or room < 1:
            raise ValueError(
                f"request {index}: {len(context)} context and {len(continuation)} continuation tokens; expected at"
                f" least one of each and at most max_length={max_length} in the continuation"
            )
        key = tuple(context[-room:])
        questions.setdefault(key, Question(key)).continuations.append((index, continuation))
    return list(questions.values())


def by_stem(questions: list[Question], *, min_stem: int = 64, min_saved: int = 4096) -> list[Group]:
    """Groups of questions that share the beginning of their contexts, then all others as one group without.

    Args:
        min_stem: fewest tokens that are worth a state of their own.
        min_saved: fewest tokens that a group must save; smaller groups only make smaller batches.
    """
    groups: list[Group] = []
    alone: list[Question] = []

    def close(stem: int, members: list[Question]) -> None:
        if stem >= min_stem and stem * (len(members) - 1) >= min_saved:
            groups.append(Group(stem, members))
        else:
            alone.extend(members)

    stem, members = 0, list[Question]()
    for question in sorted(questions, key=lambda item: item.context):
        limit = len(question.context) - 1  # one token is left to compute logits from
        if members:
            shared = min(common_prefix(members[0].context, question.context), stem, limit)
            # A much shorter stem would waste what the members so far share.
            if shared >= min_stem and (2 * shared >= stem or len(members) < 4):
                stem = shared
                members.append(question)
                continue
            close(stem, members)
        stem, members = limit, [question]
    close(stem, members)
    if alone:
        groups.append(Group(0, alone))
    return groups


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Number of tokens at the beginning that are equal."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # slices compare in C, so halving is quicker than walking
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def batches(
    items: Iterable[Item], length: Callable[[Item], int], *, rows: int, tokens: int, extra: int = 0
) -> list[list[Item]]:
    """Batches of similar length, longest first, so that the first one needs most memory.

    Args:
        length: tokens of an item.
        rows: most items in a batch.
        tokens: most padded tokens in a batch.
        extra: tokens that each row needs memory for besides.
    """
    result: list[list[Item]] = []
    longest = padding = 0
    for item in sorted(items, key=length, reverse=True):
        padding += longest - length(item)
        room = result and len(result[-1]) < rows and (len(result[-1]) + 1) * (longest + extra) <= tokens
        if room and padding <= MAX_PADDING:
            result[-1].append(item)
        else:
            result.append([item])
            longest, padding = length(item), 0
    return result

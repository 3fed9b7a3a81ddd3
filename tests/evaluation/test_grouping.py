"""Which requests are put together."""

from __future__ import annotations

import pytest

from lolcats.evaluation import grouping
from lolcats.evaluation.grouping import Question, batches, by_context, by_stem, common_prefix


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [((1, 2, 3), (1, 2, 4), 2), ((1,), (2,), 0), ((1, 2), (1, 2, 3), 2), ((), (1,), 0), ((5, 6, 7), (5, 6, 7), 3)],
)
def test_common_prefix(first, second, length):
    assert common_prefix(first, second) == length


def test_equal_contexts_are_one_question():
    questions = by_context([([1, 2], [3]), ([1], [3]), ([1, 2], [4, 5])], max_length=10)
    assert [question.context for question in questions] == [(1, 2), (1,)]
    assert questions[0].continuations == [(0, [3]), (2, [4, 5])]


def test_every_question_is_in_one_group():
    first, second = tuple(range(100, 110)), tuple(range(200, 206))
    contexts = [(*first, n) for n in range(5)] + [(*second, n, n) for n in range(4)] + [(1, 2), (3,)]
    groups = by_stem([Question(context) for context in contexts], min_stem=4, min_saved=4)
    assert sorted(q.context for group in groups for q in group.questions) == sorted(contexts)
    assert {group.stem: len(group.questions) for group in groups} == {10: 5, 6: 4, 0: 2}


def test_a_stem_leaves_a_token_of_every_context():
    context = tuple(range(20))
    (group,) = by_stem([Question(context), Question(context[:12])], min_stem=4, min_saved=4)
    assert group.stem == 11


def test_short_or_rare_stems_are_not_worth_it():
    contexts = [(1, 2, 3, n) for n in range(6)]
    assert [group.stem for group in by_stem([Question(c) for c in contexts], min_stem=4, min_saved=1)] == [0]
    assert [group.stem for group in by_stem([Question(c) for c in contexts], min_stem=3, min_saved=16)] == [0]
    assert [group.stem for group in by_stem([Question(c) for c in contexts], min_stem=3, min_saved=15)] == [3]


def lengths_of_batches(lengths, **limits):
    contexts = [range(length) for length in lengths]
    return [[len(context) for context in batch] for batch in batches(contexts, len, **limits)]


def test_batches_keep_to_their_limits():
    lengths = (3, 9, 4, 8, 1)
    assert lengths_of_batches(lengths, rows=2, tokens=100) == [[9, 8], [4, 3], [1]]
    assert lengths_of_batches(lengths, rows=9, tokens=18) == [[9, 8], [4, 3, 1]]
    assert lengths_of_batches(lengths, rows=9, tokens=18, extra=9) == [[9], [8], [4], [3], [1]]


def test_batches_waste_little(monkeypatch):
    monkeypatch.setattr(grouping, "MAX_PADDING", 5)
    # 9 - 8, 9 - 8 and 9 - 6 make five
    assert lengths_of_batches((9, 8, 8, 6, 6, 2, 2), rows=9, tokens=1000) == [[9, 8, 8, 6], [6, 2], [2]]

"""Who says what when a process fails; a store stands for the other processes."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from lolcats.errors import UserError
from lolcats.parallel.errors import describe_error, explain, is_communication_error

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer\nmore")


@pytest.fixture
def store():
    return distributed.HashStore()


def test_a_rank_that_was_taken_down_repeats_quietly_what_the_other_said(store):
    own = explain(UserError("no room"), 1, store)
    assert (str(own), own.suppress_output) == ("rank 1: no room", False)
    heard = explain(LOST, 0, store)
    assert isinstance(heard, UserError)
    assert (str(heard), heard.suppress_output) == ("rank 1: no room", True)


def test_a_rank_that_vanished_without_a_word(store):
    heard = explain(LOST, 0, store)
    assert isinstance(heard, UserError)
    assert "rank 0: another process of this run vanished" in str(heard)
    assert "(" + str(LOST).splitlines()[0] + ")" in str(heard)
    assert "--resume" in str(heard)


def test_the_same_failure_of_two_ranks_is_told_once(store):
    first, second, other = (explain(UserError(text), rank, store) for rank, text in enumerate(["a", "a", "b"]))
    assert [first.suppress_output, second.suppress_output, other.suppress_output] == [False, True, False]
    assert str(second) == "rank 1: a"


def test_mistakes_and_common_errors_pass_unchanged(store):
    mistake = KeyError("x")
    assert explain(mistake, 1, store) is mistake
    assert str(explain(LOST, 0, store)) == f"rank 1: {describe_error(mistake)}" == "rank 1: KeyError: 'x'"
    common = UserError("all of them")
    common.common = True
    assert explain(common, 0, store) is common


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (LOST, True),
        (distributed.DistNetworkError("gone"), True),
        (OSError("Broken pipe"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("NCCL"), False),
        (torch.OutOfMemoryError("NCCL"), False),
        (UserError("gloo/ is no folder"), False),
    ],
)
def test_broken_communication_is_told_from_other_errors(error, broken):
    assert is_communication_error(error) == broken

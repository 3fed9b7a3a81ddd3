import random

import numpy as np
import pytest

from lolcats.config import DataSource
from lolcats.data import BatchSampler, packing
from lolcats.data.packing import pack, tokenise
from lolcats.data.splits import mixture_counts
from lolcats.data.templates import Document
from lolcats.errors import UserError


def stream(tokenizer, documents, loss_on: str = "answer", **options):
    return tokenise([[[document] for document in documents]], tokenizer, loss_on=loss_on, **options)


QA = [Document([("ab", False), ("cd", True)]), Document([("e", False), ("fg", True)])]


def test_packing_cuts_drops_the_tail_and_never_labels_the_first_token(tokenizer) -> None:
    packed = pack(stream(tokenizer, QA), 4)
    assert [tokenizer.decode(row) for row in packed.input_ids] == ["abcd", "<|eos|>efg"]
    assert packed.label_mask.tolist() == [[False, False, True, True], [False, False, True, True]]
    assert packed.info["tokens_dropped_at_end"] == 1
    batch = packed.batch(np.array([1, 0]))  # labels are not shifted
    ids = batch["input_ids"].tolist()
    assert ids == packed.input_ids[[1, 0]].tolist()
    assert batch["labels"].tolist() == [[-100, -100, *ids[0][2:]], [-100, -100, *ids[1][2:]]]


def test_a_sequence_whose_only_label_comes_first_is_dropped(tokenizer) -> None:
    # The second sequence is "<|eos|>ef": nothing precedes its one label.
    documents = [Document([("ab", False), ("c", True)]), Document([("efgh", False), ("i", True)])]
    packed = pack(stream(tokenizer, documents), 3)
    assert [tokenizer.decode(row) for row in packed.input_ids] == ["abc", "ghi"]


@pytest.mark.parametrize("characters", [1, 7, 10**6])
def test_result_does_not_depend_on_batching(tokenizer, monkeypatch, characters: int) -> None:
    rng = random.Random(0)
    rows = [
        [Document([("x" * rng.randrange(9), False), ("y" * rng.randrange(9), True)])] * rng.randrange(3)
        for _ in range(50)
    ]
    rows = [documents or "nothing" for documents in rows]
    whole = tokenise([rows], tokenizer, loss_on="answer")
    monkeypatch.setattr(packing, "CHARACTERS_PER_CALL", characters)
    parts = tokenise([rows[start : start + 7] for start in range(0, 50, 7)], tokenizer, loss_on="answer")
    assert parts.token_ids.tolist() == whole.token_ids.tolist()
    assert parts.is_label.tolist() == whole.is_label.tolist()
    assert (parts.rows_read, parts.skipped) == (50, {"nothing": rows.count("nothing")})


@pytest.mark.parametrize(("count", "batch"), [(8, 8), (101, 8)])
def test_an_epoch_repeats_nothing_and_drops_only_the_ragged_batch(count: int, batch: int) -> None:
    sampler = BatchSampler(count, batch, seed=3)
    assert sampler.steps_per_epoch == count // batch
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        drawn = np.concatenate([sampler.indices(step) for step in steps])
        assert len(drawn) == len(set(drawn)) == count - count % batch
        assert set(drawn) <= set(range(count))
    with pytest.raises(UserError, match=f"{count} sequences, fewer than one batch of {count + 1}"):
        BatchSampler(count, count + 1, seed=0)


def test_resuming_needs_only_the_step() -> None:
    unbroken = BatchSampler(50, 4, seed=1)
    expected = [unbroken.indices(step).tolist() for step in range(30)]
    for step in (29, 0, 12, 11, 28):  # any order, each from a new object
        assert BatchSampler(50, 4, seed=1).indices(step).tolist() == expected[step]
        assert unbroken.indices(step).tolist() == expected[step]


def test_epochs_and_seeds_differ_and_the_order_is_fixed_for_good() -> None:
    first = BatchSampler(1000, 1000, seed=0)
    assert first.indices(0).tolist() != first.indices(1).tolist()
    assert first.indices(0).tolist() != BatchSampler(1000, 1000, seed=1).indices(0).tolist()
    # Recorded: a change would make old runs unrepeatable.
    assert BatchSampler(10, 10, seed=0).indices(0).tolist() == RECORDED


RECORDED = [6, 1, 0, 5, 3, 8, 7, 9, 2, 4]


MIXTURE = [0.5, 0.25, 0.25], [100, 7, 3]


@pytest.mark.parametrize(
    ("weights", "available", "limit", "repeats", "expected"),
    [
        ([3.0], [7], None, (), [7]),
        ([3.0], [7], 5, (), [5]),
        ([1.0, 1.0], [7, 100], None, (), [7, 100]),
        ([2.0, 2.0], [100, 300], 40, (), [10, 30]),
        ([3.0, 1.0], [100, 100], None, (), [100, 33]),
        ([0.1, 0.9], [10, 1000], None, (), [10, 90]),  # binary 0.1 would give [9, 90]
        ([0.3, 0.3, 0.4], [30, 100, 100], None, (), [30, 30, 40]),
        ([3.0, 1.0], [100, 100], 9, (), [7, 2]),
        ([2.0, 1.0], [0, 5], None, (), [0, 0]),
        (*MIXTURE, None, (1, 2), [100, 50, 50]),
        (*MIXTURE, 20, (1, 2), [10, 5, 5]),
        (*MIXTURE, None, (0, 2), [14, 7, 7]),
        (*MIXTURE, None, (0, 1, 2), [6, 3, 3]),
    ],
)
def test_counts(weights, available, limit, repeats, expected) -> None:
    """Sources that repeat do not limit a mixture."""
    sources = [DataSource(path="x", weight=weight, repeat=n in repeats) for n, weight in enumerate(weights)]
    assert mixture_counts(available, sources, limit) == expected

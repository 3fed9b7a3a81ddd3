"""Streams give what packing gives, from any position, in any mixture."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch

from lolcats.config import DataSection, LinearizeConfig
from lolcats.data import BatchSampler, build_datasets, build_streams, packing, stream_readers, streaming
from lolcats.data.streaming import Stream
from lolcats.errors import UserError


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Rows are read by 7 and shuffled in blocks of 6 sequences."""
    monkeypatch.setattr(packing, "ROWS_PER_READ", 7)
    monkeypatch.setattr(streaming, "BLOCK_SEQUENCES", 6)


@pytest.fixture
def shards(write_rows):
    """Three files of records of different lengths, some without an answer."""
    rows = [
        {
            "instruction": f"say {n}",
            "input": "",
            "output": chr(97 + n % 26) * (n * 13 % 70) if n % 9 else None,
            "more": n,
        }
        for n in range(120)
    ]
    for part in range(3):
        write_rows(f"shards/{part}.jsonl", rows[part * 40 : part * 40 + 40])
    return write_rows("shards/0.jsonl", rows[:40]).replace("0.jsonl", "*.jsonl")


def section(*sources, **options) -> DataSection:
    listed = [source if isinstance(source, dict) else {"path": source} for source in sources]
    return DataSection(sources=listed, **{"sequence_length": 64, "validation_rows": 10, "streaming": True} | options)


def opened(config, tokenizer, batch_size=2, seed=0):
    return Stream(build_streams(config, tokenizer, progress=False)[0], batch_size, seed)


def draw(stream, steps, first=0):
    """The batches of updates, each as one dictionary of tensors."""
    return [stream.batch(stream.indices(step)) for step in range(first, first + steps)]


def equal(one, other) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_on": "all"},
        {"sequence_length": 300, "position_offset": 500, "position_jumps": 2},
        {"begin_token": True},
    ],
)
def test_the_sequences_are_those_of_packing_in_the_same_order(shards, tokenizer, options):
    if options.get("begin_token"):
        tokenizer.bos_token = "<|user|>"
    packed, validation = build_datasets(section(shards, **options), tokenizer, seed=0, progress=False)
    count = len(packed) // 2 * 2
    config = section(shards, **options, max_train_tokens=count * packed.input_ids.shape[1])
    data, first = build_streams(config, tokenizer, progress=False)
    assert np.array_equal(first.input_ids, validation.input_ids)
    assert np.array_equal(first.label_mask, validation.label_mask)
    stream = Stream(data, 2, seed=3)
    assert stream.steps_per_epoch == count // 2 > 10
    numbers = [stream.indices(step) for step in range(stream.steps_per_epoch)]
    assert equal(draw(stream, stream.steps_per_epoch), [packed.batch(each) for each in numbers])
    assert sorted(np.concatenate(numbers)) == list(range(count))
    again = [stream.indices(stream.steps_per_epoch + step) for step in range(stream.steps_per_epoch)]
    assert not np.array_equal(again, numbers)  # another order
    assert equal(draw(stream, len(again), len(again)), [packed.batch(each) for each in again])  # of the same sequences


def test_within_a_block_batches_are_those_of_ordinary_training(shards, tokenizer, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_SEQUENCES", 1024)
    stream = opened(section(shards, max_train_tokens=64 * 21), tokenizer, seed=5)
    sampler = BatchSampler(21, 2, seed=5)
    for step in range(25):
        assert np.array_equal(stream.indices(step), sampler.indices(step))


@pytest.fixture
def mixture(shards, write_rows):
    """Two sources; the second is over after some six sequences and begins again."""
    short = write_rows("short.jsonl", [{"text": "~" * (n * 7 % 40)} for n in range(30)])
    return section({"path": shards, "weight": 2.3}, {"path": short, "weight": 1, "max_rows": 25})


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 9, 24])
def test_a_stream_continues_from_a_saved_position(mixture, tokenizer, step):
    unbroken = opened(mixture, tokenizer)
    draw(unbroken, step)
    position = json.loads(json.dumps(unbroken.position(step)))
    expected = draw(unbroken, 20, step)
    resumed = opened(mixture, tokenizer)
    resumed.seek(position)
    assert equal(draw(resumed, 20, step), expected)


def test_a_position_at_the_end_of_an_epoch_is_its_beginning(mixture, tokenizer):
    config = mixture.model_copy(update={"max_train_tokens": 64 * 16})  # 8 updates, in blocks of 3
    unbroken = opened(config, tokenizer)
    draw(unbroken, 8)
    position = unbroken.position(8)
    assert position is None
    expected = draw(unbroken, 9, 8)
    resumed = opened(config, tokenizer)
    resumed.seek(position)
    assert equal(draw(resumed, 9, 8), expected)
    assert unbroken.position(17) is not None


def test_damage_beyond_the_last_update_does_not_stop_a_run(tokenizer, write_rows):
    rows = [{"text": "a" * 63}] * 17 + [{"text": 7}]
    stream = opened(section(write_rows("a.jsonl", rows)), tokenizer)
    draw(stream, 3)
    assert stream.position(3) is not None
    with pytest.raises(UserError, match="row 17"):
        draw(stream, 1, 3)


@pytest.mark.parametrize("lost", ["rows", "rest", "taken", "given"])
def test_every_part_of_a_position_matters(mixture, tokenizer, lost):
    unbroken = opened(mixture, tokenizer)
    draw(unbroken, 9)
    position = json.loads(json.dumps(unbroken.position(9)))
    expected = draw(unbroken, 20, 9)
    assert any(source[lost] for source in position)
    for source in position:
        source.update({lost: stream_readers.FIRST[lost], "pass_from": -1})
    resumed = opened(mixture, tokenizer)
    resumed.seek(position)
    assert not equal(draw(resumed, 20, 9), expected)


def test_sources_have_their_shares_and_begin_again(mixture, tokenizer):
    batches = draw(opened(mixture, tokenizer), 150)
    from_short = np.array([["~" in tokenizer.decode(row) for row in batch["input_ids"]] for batch in batches])
    assert all(abs(from_short[:count].sum() - count * 2 / 3.3) <= 1 for count in range(3, 150, 3))  # 3: a block


def test_shares_are_kept_to_within_a_sequence():
    weights = [3.0, 1.0, 0.5]
    order = streaming.mixture_order([0, 0, 0], weights, 900)
    for count in range(1, 901):
        given = np.bincount(order[:count], minlength=3)
        assert np.abs(given - count * np.array(weights) / 4.5).max() <= 1
    parts = streaming.mixture_order(np.bincount(order[:123], minlength=3).tolist(), weights, 777)
    assert np.array_equal(parts, order[123:])


def test_a_hub_data_set_is_streamed_and_known_by_its_files(tokenizer, write_rows, monkeypatch):
    path = write_rows("hub.jsonl", [{"text": f"{n} " * 20} for n in range(40)])
    asked = []

    def builder(name, *arguments, **options):
        asked.append((name, *arguments))
        return load("json", data_files={"validation": [path]}, **options)

    load = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    data, _ = build_streams(
        section({"path": "someone/books", "name": "en", "split": "validation"}), tokenizer, progress=False
    )
    assert asked == [("someone/books", "en")]
    assert data.sources[0].files == (path,)
    assert draw(Stream(data, 2, seed=0), 1)[0]["input_ids"].shape == (2, 64)
    with pytest.raises(UserError, match="Bad split: train"):
        build_streams(section({"path": "someone/books"}), tokenizer, progress=False)


def test_the_files_are_part_of_the_fingerprint(shards, tokenizer, write_rows):
    before = build_streams(section(shards), tokenizer, progress=False)[0].info["fingerprint"]
    assert build_streams(section(shards), tokenizer, progress=False)[0].info["fingerprint"] == before
    write_rows("shards/3.jsonl", [{"instruction": "i", "input": "", "output": "o", "more": 0}])
    assert build_streams(section(shards), tokenizer, progress=False)[0].info["fingerprint"] != before


def test_nothing_beyond_what_is_asked_for_is_read(shards, tokenizer, monkeypatch):
    seen = []
    original = packing.read_documents

    def counted(*arguments, **options):
        for rows in original(*arguments, **options):
            seen.append(len(rows))
            yield rows

    monkeypatch.setattr(stream_readers, "read_documents", counted)
    stream = opened(section(shards), tokenizer)
    assert not seen
    draw(stream, 1)
    stream.close()
    assert 0 < sum(seen) < 60  # two blocks


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a" * 99}] * 10, {}, "has 10 rows, and the first 10 of each source are the validation split"),
        ([{"text": "a" * 99}] * 10 + [{"text": ""}] * 9, {}, "no training sequence of 64 tokens"),
        ([{"text": "a" * 99}] * 30 + [{"text": 7}] * 9, {}, "row 30 .counted from 0.: expected text"),
        ([{"text": "a" * 99}] * 30, {"max_train_tokens": 63}, r"data\.max_train_tokens=63 is less than one sequence"),
    ],
)
def test_what_cannot_be_used_is_said(tokenizer, write_rows, rows, options, message):
    with pytest.raises(UserError, match=message):
        draw(opened(section(write_rows("a.jsonl", rows), **options), tokenizer), 20)


def test_sources_that_need_all_rows_are_packed_before_and_repeated(tokenizer, tmp_path, write_rows, shards):
    (tmp_path / "book.txt").write_text("\n\n".join(chr(97 + n % 26) * 40 for n in range(30)))
    question = {"question": "q", "choices": {"label": ["A"], "text": ["t"]}, "answerKey": "A"}
    paths = [str(tmp_path / "book.txt"), write_rows("choices.jsonl", [question] * 30)]
    for path in paths:
        packed, validation = build_datasets(section(path), tokenizer, seed=0, progress=False)
        data, first = build_streams(section(path), tokenizer, progress=False)
        assert np.array_equal(first.input_ids, validation.input_ids)
        stream = Stream(data, 2, seed=0)
        numbers = [stream.indices(step) for step in range(len(packed))]
        assert equal(draw(stream, len(packed)), [packed.batch(each % len(packed)) for each in numbers])
    mixed = section(shards, *paths)
    unbroken, resumed = opened(mixed, tokenizer), opened(mixed, tokenizer)
    draw(unbroken, 7)
    resumed.seek(json.loads(json.dumps(unbroken.position(7))))
    assert equal(draw(resumed, 9, 7), draw(unbroken, 9, 7))


def test_each_reason_to_skip_rows_is_said_once(tokenizer, write_rows, caplog):
    rows = [{"text": "a" * 99, "messages": None}] * 20 + [{"text": " ", "messages": None}, {"messages": []}] * 5
    draw(opened(section(write_rows("a.jsonl", rows)), tokenizer), 20)
    said = [record.getMessage().partition("rows are skipped, up to row ")[2] for record in caplog.records]
    assert sorted(message.split(": ")[1] for message in said) == [
        "no assistant message to learn",
        "no text",
    ]


def test_damaged_files_are_named(tokenizer, write_rows):
    path = write_rows("a.jsonl", [{"text": "a" * 99}] * 30)
    with open(path, "a") as file:
        file.write('{"text": \n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 31: not valid JSON"):
        draw(opened(section(path), tokenizer), 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transfer": {"epochs": 3}}, r"transfer\.epochs=3 .*transfer\.max_steps .*--max-tokens"),
        ({"transfer": {"max_steps": 3}}, r"adjust\.epochs=2 "),
        (
            {
                "data": {"max_train_tokens": 9000},
                "transfer": {"block_mode": "streaming", "block_layers": 1},
            },
            r"data\.streaming .* block by block",
        ),
    ],
)
def test_what_needs_all_data_is_refused_in_the_configuration(changes, message):
    values = {**changes, "data": {"streaming": True, **changes.get("data", {})}}
    with pytest.raises(UserError, match=message):
        LinearizeConfig.from_dict(values)


def test_steps_or_tokens_end_a_stage():
    steps = {"max_steps": 3}
    LinearizeConfig.from_dict({"data": {"streaming": True}, "transfer": steps, "adjust": steps})
    LinearizeConfig.from_dict({"data": {"streaming": True}, "transfer": steps, "adjust": {"enabled": False}})
    LinearizeConfig.from_dict({"data": {"streaming": True, "max_train_tokens": 9000}})

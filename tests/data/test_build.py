import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lolcats.config import DataSection, DataSource
from lolcats.data import build_datasets, build_evaluation_dataset, packing, templates
from lolcats.errors import UserError


def alpaca(count: int, letter: str = "x") -> list[dict[str, Any]]:
    return [{"instruction": "i", "input": "", "output": letter * 20 + str(number)} for number in range(count)]


def texts(count: int, letter: str) -> list[dict[str, Any]]:
    return [{"text": letter * 31} for _ in range(count)]  # 32 tokens with EOS


def section(*paths: str, **options: Any) -> DataSection:
    weights = options.pop("weights", [1.0] * len(paths))
    data_sources = [DataSource(path=path, weight=weight) for path, weight in zip(paths, weights, strict=True)]
    return DataSection(sources=data_sources, **{"sequence_length": 32, "validation_rows": 4} | options)


def make(config: DataSection, tokenizer, seed: int = 0):
    return build_datasets(config, tokenizer, seed=seed, progress=False)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the sources that were really tokenised."""
    seen: list[str] = []
    original = packing.read_documents

    def counted(*arguments, name: str, **options):
        seen.append(Path(name).name)
        return original(*arguments, name=name, **options)

    monkeypatch.setattr(packing, "read_documents", counted)
    return seen


def first_letters(data, tokenizer) -> str:
    return "".join(tokenizer.decode(row[:1]) for row in data.input_ids)


def test_splits_are_disjoint_packed_in_order_and_counted(tokenizer, write_rows) -> None:
    path = write_rows("a.jsonl", [{"text": chr(97 + number) * 31} for number in range(20)])
    train, validation = make(section(path), tokenizer)
    assert first_letters(validation, tokenizer) == "abcd"
    assert first_letters(train, tokenizer) == "efghijklmnopqrst"
    assert len(train) == train.info["sequences"] == 16
    assert train.info["tokens"] == 16 * 32
    assert train.info["label_tokens"] == train.label_mask.sum() == 16 * 31
    (source,) = train.info["sources"]
    assert source["path"] == path
    assert source["format"] == "text"
    assert (source["rows"], source["rows_skipped"]) == (16, 0)
    assert len(train.info["fingerprint"]) == 64


def test_alpaca_labels_are_exactly_the_answers(tokenizer, write_rows) -> None:
    path = write_rows("a.jsonl.gz", [{"instruction": "go", "output": "AB"}] * 30)
    row_tokens = len(templates.ALPACA_PROMPT.format(instruction="go")) + 3
    train, _ = make(section(path, sequence_length=2 * row_tokens), tokenizer)
    assert len(train) == 13
    for ids, mask in zip(train.input_ids, train.label_mask, strict=True):
        assert tokenizer.decode(ids[mask]) == "AB<|eos|>" * 2
        assert tokenizer.decode(ids[row_tokens - 3 : row_tokens]) == "AB<|eos|>"
        assert mask[row_tokens - 3 : row_tokens].all()
    everything, _ = make(section(path, sequence_length=100, loss_on="all"), tokenizer)
    assert everything.label_mask[:, 1:].all()


def test_a_source_may_have_its_own_labels(tokenizer, write_rows, reads) -> None:
    paths = [write_rows("a.jsonl", alpaca(60, "x")), write_rows("b.jsonl", alpaca(60, "y"))]
    plain = section(*paths, sequence_length=400)
    mixed = plain.model_copy(deep=True)
    mixed.sources[1].loss_on = "all"
    data, _ = make(mixed, tokenizer)
    for ids, mask in zip(data.input_ids, data.label_mask, strict=True):
        assert mask[1:].all() == ("yy" in tokenizer.decode(ids))
    assert {"a.jsonl", "b.jsonl"} == set(reads)
    reads.clear()
    others, _ = make(plain, tokenizer)  # not the cached tokens of the mixture above
    assert reads
    assert others.label_mask.mean() < data.label_mask.mean()
    answers = section(*paths, sequence_length=400, loss_on="all")
    answers.sources[0].loss_on = "answer"
    assert np.array_equal(make(answers, tokenizer)[0].label_mask, data.label_mask)


def test_training_sequences_start_anywhere_up_to_the_offset(tokenizer, write_rows, reads) -> None:
    path = write_rows("a.jsonl", texts(40, "a"))
    without, _ = make(section(path, sequence_length=16), tokenizer)
    before = len(reads)
    train, validation = make(section(path, sequence_length=16, position_offset=9), tokenizer)
    assert len(reads) == before  # packed data are the same
    position_NT = train.batch(range(len(train)))["rotary_positions"]
    first_N = position_NT[:, 0]
    assert (position_NT == first_N[:, None] + torch.arange(16)).all()
    assert sorted(first_N[:30].unique().tolist()) == list(range(10))
    assert set(validation.batch([0])) == set(without.batch([0])) == {"input_ids", "labels"}


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_positions_of_a_share_of_the_training_sequences_jump_ahead(tokenizer, write_rows, share) -> None:
    path = write_rows("a.jsonl", texts(200, "a"))
    settings = {"sequence_length": 16, "position_offset": 900, "position_jumps": 2, "position_share": share}
    train, _ = make(section(path, **settings), tokenizer)
    position_NT = train.batch(range(len(train)))["rotary_positions"]
    assert torch.equal(train.batch([7, 4])["rotary_positions"], position_NT[[7, 4]])  # the same in every epoch
    stays_N = (position_NT == torch.arange(16)).all(1)
    for part in stays_N.float().split(20):  # evenly spread
        assert len(part) < 20 or abs(1 - part.mean() - share) <= 0.15
    step_NT = position_NT[~stays_N].diff(dim=1)
    assert (step_NT >= 1).all()
    assert ((step_NT > 1).sum(1) <= 2).all()
    assert position_NT.min() >= 0
    assert 700 < position_NT.max() < 916  # up to the whole offset
    assert step_NT.sum(1).float().mean() > 300  # the distances of longer texts
    assert len((step_NT > 1).float().argmax(1).unique()) > 8  # anywhere
    with pytest.raises(ValueError, match="still 'auto'"):
        make(section(path, sequence_length=16, position_offset="auto"), tokenizer)
    for wrong, reason in (
        ({"position_offset": 0}, "needs a position_offset"),
        ({"position_jumps": 16}, "expected fewer"),
        ({"position_share": 0.0}, "position_share"),
    ):
        with pytest.raises(ValueError, match=reason):
            section(path, **{**settings, **wrong})


def test_every_sequence_begins_with_the_begin_token(tokenizer, write_rows) -> None:
    path = write_rows("a.jsonl", texts(20, "a"))
    with pytest.raises(UserError, match="has no begin token"):
        make(section(path, begin_token=True), tokenizer)
    without, _ = make(section(path), tokenizer)
    tokenizer.bos_token = "<|user|>"
    begin = tokenizer.bos_token_id
    config = section(path, begin_token=True)
    train, validation = make(config, tokenizer)
    evaluation = build_evaluation_dataset(config, tokenizer, progress=False)
    for data in (train, validation, evaluation):
        assert data.input_ids.shape[1] == 32
        assert (data.input_ids[:, 0] == begin).all()
        assert not (data.input_ids[:, 1:] == begin).any()
        assert not data.label_mask[:, 0].any()
    assert (train.input_ids[0, 1:] == without.input_ids[0, :31]).all()


def test_special_tokens_beyond_the_embedding_are_refused(tokenizer, write_rows) -> None:
    data = section(write_rows("t.jsonl", [{"text": "a<|end|>"}, *texts(20, "b")]))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with pytest.raises(UserError, match=rf"contain <\|end\|>, .* embedding of {end} rows"):
        build_datasets(data, tokenizer, seed=0, vocabulary=end, progress=False)


def test_text_file_is_one_document(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join("abcdefghij"))
    train, validation = make(section(str(tmp_path / "a.txt"), sequence_length=5), tokenizer)
    assert tokenizer.decode(validation.input_ids.reshape(-1)) == "a\n\nb\n\nc\n\nd"
    assert tokenizer.decode(train.input_ids.reshape(-1)) == "\n\ne\n\nf\n\ng\n\nh\n\ni"


def test_cache_hit_needs_no_reading(tokenizer, write_rows, reads, cache_root: Path) -> None:
    config = section(write_rows("a.jsonl", texts(10, "a")))
    tokenizer.pad_token = "<|end|>"
    first = make(config, tokenizer)
    assert reads == ["a.jsonl", "a.jsonl"]
    tokenizer(["abc", "d"], padding="max_length", truncation=True, max_length=2)  # what changes is how it was used
    second = make(config, tokenizer, seed=9)  # one source: nothing is chosen, the seed does not matter
    assert len(reads) == 2
    for one, other in zip(first, second, strict=True):
        assert one.info == other.info
        assert np.array_equal(one.input_ids, other.input_ids)
    (file,) = cache_root.glob("packed-*")
    file.write_bytes(file.read_bytes()[:-4])
    (cache_root / ".unfinished-x").mkdir()  # by a process that was killed
    os.utime(cache_root / ".unfinished-x", (0, 0))
    make(config, tokenizer)
    assert len(reads) == 4
    assert not (cache_root / ".unfinished-x").exists()
    assert [name.suffix for name in cache_root.glob("*packed*")] == [".safetensors"]


def test_cache_misses(tokenizer, new_tokenizer, write_rows, reads) -> None:
    path = write_rows("a.jsonl", texts(10, "a"))
    make(section(path), tokenizer)
    before = len(reads)
    for change in (
        {"sequence_length": 16},
        {"validation_rows": 5},
        {"loss_on": "all"},
        {"max_train_tokens": 64},
    ):
        make(section(path, **change), tokenizer)
        assert len(reads) == before + 2, change
        before = len(reads)
    extended = new_tokenizer()
    extended.add_tokens(["word"])
    for changed in (new_tokenizer(eos="<|end|>"), new_tokenizer(chat_template="x"), extended):
        make(section(path), changed)
    assert len(reads) == before + 6
    write_rows("a.jsonl", texts(10, "b"))  # same size, same name
    train, _ = make(section(path), tokenizer)
    assert len(reads) == before + 8
    assert set(first_letters(train, tokenizer)) == {"b"}


def test_a_cache_that_cannot_be_written_is_named(tokenizer, write_rows, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl: .* or LOLCATS_CACHE"):
        make(section(write_rows("a.jsonl", texts(10, "a"))), tokenizer)


def test_unequal_weights_are_shares_of_sequences(tokenizer, write_rows) -> None:
    rows = [{"text": f"{number:03d}" + "a" * 28} for number in range(104)]
    config = section(write_rows("a.jsonl", rows), write_rows("b.jsonl", texts(24, "b")), weights=[0.75, 0.25])
    train, _ = make(config, tokenizer)
    used = [source["sequences_used"] for source in train.info["sources"]]
    assert used == [60, 20]
    assert len(np.unique(train.input_ids[:60], axis=0)) == 60  # no repeats
    assert train.info["fingerprint"].startswith("75327aa1776b041f")  # of old runs, which resume with the same rows
    assert make(config, tokenizer, seed=1)[0].info["fingerprint"] != train.info["fingerprint"]


def test_max_train_tokens(tokenizer, write_rows) -> None:
    one = section(write_rows("a.jsonl", texts(24, "a")), max_train_tokens=5 * 32 + 31)
    train, validation = make(one, tokenizer)
    assert (len(train), len(validation)) == (5, 4)
    two = section(write_rows("a.jsonl", texts(24, "a")), write_rows("b.jsonl", texts(14, "b")), max_train_tokens=192)
    assert first_letters(make(two, tokenizer)[0], tokenizer) == "aaaabb"


def test_evaluation_data_holds_every_token_once(tokenizer, write_rows) -> None:
    path = write_rows("a.jsonl", [{"text": "abcdef"}, {"text": "gh"}])
    data = build_evaluation_dataset(section(path, sequence_length=8), tokenizer, progress=False)
    eos = "<|eos|>"
    assert [tokenizer.decode(row) for row in data.input_ids] == [f"abcdef{eos}g", f"h{eos}" + eos * 6]
    assert data.label_mask.sum() == 10 - 2  # all tokens but the first of each sequence


GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
BLANK = {"text": "  "}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (texts(4, "a"), {}, r"has 4 rows, and the first 4 .*lower data\.validation_rows"),
        (texts(4, "a") + [BLANK] * 3, {}, "nothing is left of the 3 training rows"),
        ([BLANK] * 4 + texts(4, "a"), {}, "nothing is left of the 4 validation rows"),
        (texts(6, "a"), {"sequence_length": 65}, "the 2 training rows hold 64 tokens, less than one sequence of 65"),
        (texts(60, "a"), {"sequence_length": 129}, r"4 validation rows hold 128 tokens.*raise data\.validation_rows"),
        # The first 1000 training tokens, which are all that is asked for, lie inside one prompt.
        (
            [{"instruction": "x" * 5000, "output": "y"}] * 6,
            {"sequence_length": 1000, "max_train_tokens": 1000},
            "no training sequence of 1000 tokens holds a token to learn",
        ),
        (texts(9, "a"), {"max_train_tokens": 31}, r"data\.max_train_tokens=31 is less than one sequence"),
        (
            [GOOD] * 7 + [{"messages": [{"role": None, "content": None}]}],
            {},
            r"a\.jsonl, row 7 \(counted from 0\): expected messages with role and content",
        ),
        ([*texts(6, "a"), {"text": ["list"]}], {}, r"row 6 .*expected text in column 'text', got list"),
        ([{"content": "x"}] * 9, {}, "it has 'content'"),
        ([GOOD] * 5 + [{"messages": ["hi"], "system": "s"}], {}, r"row 5 .counted from 0. has another form"),
        ([GOOD] * 9, {}, "5 training rows: 5 x the chat template does not take it: roles must alternate"),
    ],
)
def test_data_that_cannot_be_used(tokenizer, write_rows, rows, options, message) -> None:
    if "chat template" in message:
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=message):
        make(section(write_rows("a.jsonl", rows), **options), tokenizer)


def test_skipped_rows_are_counted_and_explained(tokenizer, write_rows, capsys) -> None:
    rows = [*texts(4, "a"), {"text": None}, GOOD, {"messages": [{"role": "user", "content": "?"}]}, *texts(4, "b")] * 3
    config = section(write_rows("a.jsonl", rows))
    for _ in range(2):  # packed, and from the cache
        train, validation = build_datasets(config, tokenizer, seed=0, progress=True)
        (told,) = [line for line in capsys.readouterr().err.splitlines() if "not used" in line]
        assert told.endswith(
            "a.jsonl: 6 of 33 rows are not used: 3 x no request, or no answer to it; 3 x no assistant message to learn"
        )
    config = section(write_rows("b.jsonl", texts(24, "b")), write_rows("c.jsonl", texts(24, "c")), weights=[1e9, 1])
    build_datasets(config, tokenizer, seed=0, progress=True)
    assert capsys.readouterr().err.rstrip().endswith("c.jsonl: no training sequence is left of it")
    assert sum(train.info["sources"][0]["skipped"].values()) == train.info["sources"][0]["rows_skipped"] == 6
    assert validation.info["sources"][0]["skipped"] == {}

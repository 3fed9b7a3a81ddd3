"""The scripts of benchmarks/ on the tiny shape, on a CPU."""

import json
import sys

import attention
import decode
import pytest
import torch
import train
from bench_tools import main

from lolcats.errors import UserError

SCRIPTS = {
    "attention": (attention, attention.AttentionBench),
    "decode": (decode, decode.DecodeBench),
    "train": (train, train.TrainBench),
}

DECODE = [
    "decode", "--model", "tiny", "--batches", "1,2", "--softmax-batches", "1,2", "--prompt-tokens", "12",
    "--new-tokens", "20", "--prefill-lengths", "8,40", "--prefill-chunk", "16",
    "--window-size", "4", "--dtype", "float32", "--device", "cpu",
]  # fmt: skip
PREFILLS = ["lolcats", "lolcats generate()", "softmax", "softmax generate()"]  # in turn at each length
TRAIN = ["train", "--model", "tiny", "--device", "cpu", "--dtype", "float32", "--tokens", "32", "--steps", "2"]
ATTENTION = [
    "attention", "--shapes", "1x20,2x9", "--implementations", "chunked,reference,triton", "--heads", "2", "--kv-heads",
    "1", "--head-dim", "8", "--feature-dim", "4", "--dtype", "float32", "--device", "cpu", "--budget-s", "0",
]  # fmt: skip


@pytest.fixture
def call(monkeypatch):
    """`call(NAME, *arguments)`: the script of this name."""

    def run(name, *arguments):
        script, kind = SCRIPTS[name]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        main(vars(script), kind())

    return run


@pytest.fixture
def bench(call, tmp_path, capsys):
    """`bench(*arguments)` -> (what was printed, the JSON file)."""

    def run(*arguments):
        file = tmp_path / "new" / "out.json"
        call(*arguments, "--json", str(file))
        assert [path.name for path in file.parent.iterdir()] == ["out.json"]
        return capsys.readouterr().out, json.loads(file.read_text())

    return run


def test_attention(bench):
    text, report = bench(*ATTENTION)
    assert report["settings"]["attention"]["feature_dim"] == 4
    found = {(row["implementation"], row["mode"], row["tokens"]): row for row in report["rows"]}
    assert len(found) == 3 * 5 * 2
    for (name, mode, tokens), row in found.items():
        assert ("error" in row) == (name == "triton"), (name, mode, tokens)  # needs a GPU
        assert name == "triton" or row["relative_error"] < 1e-5  # float32
    assert found["chunked", "train", 9]["ns_per_token"] == pytest.approx(
        found["chunked", "train", 9]["median_ms"] * 1e6 / 18
    )
    assert "1 x 20" in text


def test_train(bench):
    text, report = bench(*TRAIN, "--accumulate", "2", "--micro-batches", "1,2", "--sinks", "1")
    assert [(row["micro_batch"], row["row"]) for row in report["rows"]] == [
        (size, name) for size in (1, 2) for name in train.ROWS
    ]
    for row in report["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["micro_batch"] * 2 * 32 / row["step_ms"] * 1e3)
    assert report["settings"]["attention"]["sinks"] == 1
    assert torch.__version__.startswith(report["provenance"]["versions"]["torch"])  # without "+cu130"
    assert all(name in text for name in train.ROWS)


def test_decode(bench):
    text, report = bench(*DECODE)
    rows = {name: section["rows"] for name, section in report["sections"].items()}
    assert not [row for section in rows.values() for row in section if "error" in row]
    assert {name: [row["system"] for row in section] for name, section in rows.items()} == {
        "throughput": ["lolcats"] * 2, "prefill": PREFILLS * 2, "softmax_engine": ["softmax engine"] * 2,
    }  # fmt: skip
    for row in rows["throughput"] + rows["softmax_engine"]:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3)
        assert row["finite"]
    first, last = rows["throughput"]
    # 2 layers of 2 heads: state 16 x 16 + 16 sums and a ring of 8 keys and values of 16 numbers.
    assert first["state_mib_per_sequence"] * 2**20 == 2 * 2 * (16 * 16 + 16 + 2 * 8 * 16) * 4
    assert last["steps_measured"] == 2 * 4  # two whole blocks
    assert all(name in text for name in decode.SECTIONS)
    # All heads exact: room for 12 + 20 tokens and one of padding in 2 layers of 2 heads of 16.
    assert rows["softmax_engine"][0]["state_mib_per_sequence"] * 2**20 == 2 * 2 * 2 * 33 * 16 * 4


def test_decode_with_exact_heads(bench):
    sections = ("--sections", "throughput,prefill", "--exact", '["0.1", "1"]', "--no-read-prompts")
    report = bench(*DECODE, *sections)[1]
    rows = {name: section["rows"] for name, section in report["sections"].items()}
    assert not [row for section in rows.values() for row in section if "error" in row]
    assert [row["system"] for row in rows["prefill"]] == [PREFILLS[0], "all linear", *PREFILLS[1:]] * 2
    # One linear head, and three exact ones with room for 12 + 20 tokens and one of padding.
    linear, exact = (16 * 16 + 16 + 2 * 8 * 16) * 4, 3 * 2 * 33 * 16 * 4
    assert rows["throughput"][0]["state_mib_per_sequence"] * 2**20 == linear + exact
    assert rows["throughput"][1]["prefill_s"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--shapes", "64"], "--shapes: expected values such as"),
        (["attention", "--implementations", "magic"], "there is no 'magic'"),
        (["attention", "--heads", "3", "--kv-heads", "2"], "not a multiple"),
        (["train", "--model", "huge"], "no model shape named 'huge'"),
        (["decode", "--sections", "nap"], "no section named 'nap'"),
        (["decode", "--new-tokens", "0"], "must be at least 1"),
    ],
)
def test_wrong_options(call, arguments, message):
    with pytest.raises(UserError) as refused:
        call(*arguments)
    assert message in str(refused.value)

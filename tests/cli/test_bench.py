"""`lolcats bench`: from options to settings, with the measuring replaced."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lolcats.bench.attention import save

ATTENTION = {"IMPLEMENTATIONS": ("triton", "chunked"), "MODES": ("forward", "train")}


@pytest.fixture
def kept():
    """Files in tmp_path when each run was half done."""
    return []


@pytest.fixture
def measured(replace_module, tmp_path, kept):
    """Settings of each run."""
    seen = []

    def fake(**names):
        def run(settings, console, keep=lambda report: None):
            seen.append(vars(settings))
            console.print("measuring")
            keep({"rows": []})
            kept.append(len(list(tmp_path.iterdir())))
            keep({"rows": [1]})
            return {"rows": [1]}

        def print_table(report, console):
            console.print(f"table of {report['rows']}")

        return {"run": run, "print_table": print_table, "save": save, **names}

    replace_module("lolcats.bench.attention", **fake(AttentionBench=SimpleNamespace, **ATTENTION))
    replace_module("lolcats.bench.train", **fake(TrainBench=SimpleNamespace, ROWS=("transfer", "adjust")))
    replace_module("lolcats.bench.decode", **fake(DecodeBench=SimpleNamespace, SECTIONS=("throughput", "latency")))
    return seen


def test_attention(cli, measured, tmp_path):
    file = tmp_path / "a.json"
    result = cli("bench", "attention", "--shapes", "1x64,2x128", "--modes", "train", "--heads", 4, "--kv-heads", 2,
                 "--json", file)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert measured[0]["shapes"] == ((1, 64), (2, 128))
    assert measured[0]["modes"] == ("train",)
    assert (measured[0]["heads"], measured[0]["kv_heads"]) == (4, 2)
    assert not {"implementations", "device", "dtype"} & measured[0].keys()  # the benchmark's own defaults
    assert "table of [1]" in result.stdout
    assert "measuring" in result.stderr
    assert json.loads(file.read_text()) == {"rows": [1]}


def test_train(cli, measured):
    result = cli("bench", "train", "--model", "tiny", "--shapes", "1x64,4x64", "--rows", "adjust", "--steps", 3,
                 "--no-cuda-graphs", "--device", "cpu")  # fmt: skip
    assert result.exit_code == 0, result.output
    expected = {"model": "tiny", "micro_batches": (1, 4), "tokens": 64, "rows": ("adjust",), "steps": 3}
    assert expected.items() <= measured[0].items()
    assert (measured[0]["cuda_graphs"], measured[0]["fused_kernels"]) == ("off", "auto")
    assert cli("bench", "train").exit_code == 0
    assert not {"model", "micro_batches", "tokens", "rows", "device"} & measured[1].keys()


def test_decode(cli, measured, kept, tmp_path):
    file = tmp_path / "d.json"
    result = cli("bench", "decode", "--model", "tiny", "--batches", "1,8", "--sections", "latency,throughput",
                 "--positions", "100", "--endurance-tokens", 0, "--json", file)  # fmt: skip
    assert result.exit_code == 0, result.output
    expected = {"model": "tiny", "batches": (1, 8), "sections": ("latency", "throughput"), "positions": (100,)}
    assert expected.items() <= measured[0].items()
    assert measured[0]["endurance_tokens"] == 0
    assert not {"softmax_batches", "prefill_lengths", "device"} & measured[0].keys()
    assert kept == [1]  # written before the run ended
    assert json.loads(file.read_text()) == {"rows": [1]}


def test_decode_draws(cli, measured, replace_module, tmp_path):
    drawn = []
    names = {"plot": lambda report, path: drawn.append((report, path)), "require_matplotlib": lambda: None}
    replace_module("lolcats.bench.decode_plot", **names)
    assert cli("bench", "decode", "--plot", tmp_path / "d.png").exit_code == 0
    assert drawn == [({"rows": [1]}, tmp_path / "d.png")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--shapes", "64"), "expected batch x tokens"),
        (("train", "--shapes", "0x64"), "expected batch x tokens"),
        (("train", "--shapes", "1x64,1x32"), "one number of tokens"),
        (("train", "--rows", "sleep"), "there is no 'sleep'; choose of transfer, adjust"),
        (("attention", "--implementations", "magic"), "there is no 'magic'"),
        (("decode", "--batches", "1,x"), "--batches: expected whole numbers"),
        (("decode", "--positions", "0"), "--positions: expected whole numbers"),
        (("decode", "--sections", "nap"), "there is no 'nap'; choose of throughput, latency"),
        (("attention", "--heads", "3", "--kv-heads", "2"), "not a multiple"),
    ],
)
def test_wrong_options(cli, measured, arguments, message):
    result = cli("bench", *arguments)
    assert (result.exit_code, measured) == (1, [])
    assert message in result.stderr


def test_a_file_that_cannot_be_written(cli, measured, tmp_path):
    result = cli("bench", "train", "--json", tmp_path)
    assert result.exit_code == 1
    assert "cannot write" in result.stderr
    assert "table of" not in result.stdout  # it shows before anything is measured


def test_help_lists_all(cli):
    text = cli("bench", "--help").stdout
    assert all(name in text for name in ("attention", "train", "decode"))

"""A run whose data are streamed: killed and resumed, it ends as an unbroken one."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from lolcats.config import LinearizeConfig, merge
from lolcats.data import stream_readers, streaming
from lolcats.training.checkpoint import list_checkpoints

STREAMED = {"data": {"streaming": True}}
STAGE_1 = STREAMED | {"adjust": {"enabled": False}}
KILLED = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from lolcats.config import LinearizeConfig
from lolcats.data import streaming
from lolcats.pipeline import linearize
from lolcats.training.attention_transfer import TransferStage

streaming.BLOCK_SEQUENCES = 6
micro_step, made = TransferStage.micro_step, []

def killed(self, *arguments):
    made.append(1)
    if len(made) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return micro_step(self, *arguments)

TransferStage.micro_step = killed
linearize(LinearizeConfig.from_yaml(sys.argv[1]), Path(sys.argv[2]), console=Console(quiet=True))
"""


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_SEQUENCES", 6)


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("_small_blocks")
def test_killed_and_resumed_it_ends_with_the_weights_of_an_unbroken_run(run, settings, tmp_path, monkeypatch):
    run(tmp_path / "unbroken", STAGE_1)
    unbroken = weights(tmp_path / "unbroken")

    recipe, broken = tmp_path / "recipe.yaml", tmp_path / "broken"
    recipe.write_text(LinearizeConfig.from_dict(merge(settings, STAGE_1)).to_yaml())
    killed = subprocess.run([sys.executable, "-c", KILLED, recipe, broken], check=False, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    (saved,) = list_checkpoints(broken / "run" / "transfer", "step")
    assert saved.name == "step-00000004"
    assert json.loads((saved / "state.json").read_text())["state"]["stream"][0]["given"] == 6  # the second block
    shutil.copytree(broken, tmp_path / "forgetful")
    run(broken, STAGE_1, resume=True)
    assert equal(weights(broken), unbroken)

    seek, start = streaming.Stream.seek, stream_readers.FIRST | {"row": 10}
    monkeypatch.setattr(streaming.Stream, "seek", lambda self, position: seek(self, [start]))
    run(tmp_path / "forgetful", STAGE_1, resume=True)
    assert not equal(weights(tmp_path / "forgetful"), unbroken)


def test_a_short_stream_trains_as_the_packed_data(run, tmp_path):
    tokens = {"data": {"max_train_tokens": 10 * 48}}
    run(tmp_path / "packed", tokens)
    report = run(tmp_path / "streamed", tokens, STREAMED)
    (source,) = report["data"]["train"]["sources"]
    assert (source["format"], source["streamed"]) == ("alpaca", True)
    assert report["stages"]["transfer"]["tokens"] == report["stages"]["adjust"]["tokens"] == 6 * 2 * 48
    assert equal(weights(tmp_path / "streamed"), weights(tmp_path / "packed"))

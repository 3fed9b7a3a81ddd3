"""A four-layer model, settings of runs that take seconds, and such runs in this process and in several."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lolcats.config import LinearizeConfig, merge
from lolcats.pipeline import linearize

QUIET = Console(quiet=True)


@pytest.fixture(scope="session")
def deep_model_dir(model_dir, tmp_path_factory):
    """As `model_dir`, with four layers and in several shards."""
    folder = tmp_path_factory.mktemp("deep-model")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    config = LlamaConfig.from_pretrained(model_dir, num_hidden_layers=4)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6.0)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture(scope="session")
def settings(deep_model_dir, data_file):
    """Configuration values of a run of stage 1; its validation losses fall to the end."""
    return {
        "model": {"path": str(deep_model_dir), "device": "cpu"},
        "attention": {"window_size": 4},
        "data": {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_rows": 10},
        "transfer": {"lr": 3e-3, "batch_size": 4, "micro_batch_size": 2, "epochs": 1, "block_layers": 1}
        | {"eval_every": 3, "checkpoint_every": 2},
        "adjust": {"enabled": False},
    }


@pytest.fixture(scope="session")
def configure(settings):
    """configure(**sections) -> a configuration with changes to `settings`."""

    def build(**sections: Any) -> LinearizeConfig:
        return LinearizeConfig.from_dict(merge(copy.deepcopy(settings), sections))

    return build


@pytest.fixture(scope="session")
def half_exact(haystack):
    """Changes of settings: half of the heads are to be exact."""
    return {"attention": {"exact": "50%"}, "gates": {"haystack": haystack, "sequence_length": 512}}


@pytest.fixture(scope="session")
def joint(configure, tmp_path_factory):
    """joint(size) -> output folder and report of joint training with one optimizer per block of `size` layers."""
    made: dict[int, Any] = {}

    def train(size: int) -> Any:
        if size not in made:
            output = tmp_path_factory.mktemp("joint") / "out"
            made[size] = output, linearize(configure(transfer={"block_layers": size}), output, console=QUIET)
        return made[size]

    return train


@pytest.fixture(scope="session")
def different_layers():
    """different_layers(folder, other) -> numbers of the layers whose feature maps differ in any bit."""

    def compare(*folders: Path) -> set[int]:
        states = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders]
        found, expected = ({name: x for name, x in s.items() if "linear_attention" in name} for s in states)
        assert found.keys() == expected.keys()
        return {int(name.split(".")[3]) for name, x in expected.items() if not torch.equal(found[name], x)}

    return compare


@pytest.fixture
def assert_equals_joint(joint, different_layers):
    """assert_equals_joint(folder, size): the feature maps are those of joint training, to the last bit."""

    def check(folder: Path, size: int = 1) -> None:
        assert not different_layers(folder, joint(size)[0])

    return check


# --- several processes --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def both_stages(settings, model_dir):
    """Configuration values of a short run of both stages of a two-layer model, with sharded weights."""
    stage = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 4, "eval_every": 2, "checkpoint_every": 2}
    return {
        "model": {"path": str(model_dir), "device": "cpu"},
        "attention": {"window_size": 4},
        "data": settings["data"] | {"sequence_length": 32},
        "transfer": stage,
        "adjust": stage | {"lr": 1e-2},
        "parallel": {"shard": "on"},
    }


@pytest.fixture(scope="session")
def alone(both_stages, tmp_path_factory):
    """alone(changes) -> the folder and report of the run in this process; each is made once."""
    made = {}

    def get(changes):
        key = str(changes)
        if key not in made:
            output = tmp_path_factory.mktemp("alone") / "out"
            config = LinearizeConfig.from_dict(merge(both_stages, changes))
            made[key] = output, linearize(config, output, console=QUIET)
        return made[key]

    return get


@pytest.fixture(scope="session")
def weights():
    """weights(folder) -> name -> tensor."""

    def read(folder: Path) -> dict[str, torch.Tensor]:
        return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}

    return read


@pytest.fixture(scope="session")
def broken_model(deep_model_dir):
    """broken_model(folder) -> a copy of the model there, and the shard that holds a tensor, by the tensor's name."""

    def copied(folder: Path) -> Any:
        shutil.copytree(deep_model_dir, folder)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return folder, lambda name: folder / index["weight_map"][name]

    return copied

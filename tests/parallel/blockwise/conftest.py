"""A four-layer model, and runs of it."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
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
def settings(deep_model_dir, data_file, tmp_path_factory):
    """Configuration values of a run of stage 1 in a few seconds; its validation losses fall to the end."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOLCATS_CACHE", str(cache))
        yield {
            "model": {"path": str(deep_model_dir), "device": "cpu"},
            "attention": {"window_size": 4},
            "data": {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_rows": 10},
            "transfer": {
                "lr": 3e-3,
                "batch_size": 4,
                "micro_batch_size": 2,
                "epochs": 2,
                "eval_every": 3,
                "checkpoint_every": 2,
                "block_layers": 1,
            },
            "adjust": {"enabled": False},
        }


@pytest.fixture(scope="session")
def configure(settings):
    """A configuration with changes to `settings`, section by section."""

    def build(**sections: Any) -> LinearizeConfig:
        return LinearizeConfig.from_dict(merge(copy.deepcopy(settings), sections))

    return build


@pytest.fixture
def feature_maps():
    """name -> tensor of the trained part of a linearized folder."""

    def read(folder: Any) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(folder)
        return {name: tensor for name, tensor in model.state_dict().items() if "linear_attention" in name}

    return read


@pytest.fixture(scope="session")
def joint(configure, tmp_path_factory):
    """Output folder and report of joint training with one optimizer per block of `size` layers."""
    made: dict[int, Any] = {}

    def train(size: int) -> Any:
        if size not in made:
            output = tmp_path_factory.mktemp("joint") / "out"
            made[size] = output, linearize(configure(transfer={"block_layers": size}), output, console=QUIET)
        return made[size]

    return train


@pytest.fixture(scope="session")
def families():
    """The tiny models of all families, as tests of `lolcats.modeling` use them."""
    file = Path(__file__).parent.parent.parent / "modeling" / "conftest.py"
    spec = importlib.util.spec_from_file_location("family_models", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Kit

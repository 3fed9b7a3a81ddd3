"""What is compiled ahead is what training launches."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM

from lolcats.config import LinearizeConfig
from lolcats.conversion import convert
from lolcats.data import PackedDataset
from lolcats.modeling.call import AttentionCall
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.compile_ahead import run_adjust, run_transfer
from lolcats.training.finetune import AdjustStage

pytest.importorskip("triton")
launch = importlib.import_module("lolcats.ops.hybrid_attention.kernels.launch")
BATCH, TOKENS = 2, 40


def specialised(x):
    """What Triton compiles for, of an argument."""
    return x.dtype if isinstance(x, torch.Tensor) else (x == 1, x % 16 == 0) if isinstance(x, int) else type(x)


@pytest.fixture
def launched(monkeypatch):
    """The kernels that are launched, none of which runs, with what decides how they are compiled."""
    found = set()

    def first_launch(kernel, grid, arguments, constants):
        given = tree_map(specialised, arguments)
        function = kernel.function if isinstance(kernel, launch.Tuned) else kernel
        found.add(str((function.fn.__name__, constants, given)))
        return None, constants | (kernel.lists[0][0].kwargs if isinstance(kernel, launch.Tuned) else {})

    monkeypatch.setattr(launch, "_first_launch", first_launch)
    monkeypatch.setattr(launch, "_runner", lambda *_: lambda *_, stream: None)
    monkeypatch.setattr(launch, "_stream", lambda device: None)
    monkeypatch.setattr(launch, "KEPT", False)
    for module in ("api", "losses"):
        module = importlib.import_module(f"lolcats.ops.hybrid_attention.{module}")
        monkeypatch.setattr(module, "has_kernel", lambda backend, q, why_not: True)
    return found


@pytest.mark.parametrize("exact", [(), ("0.1", "1.1")], ids=["all linear", "exact heads"])
@pytest.mark.parametrize("feature_maps", [False, True])
def test_training_launches_nothing_else(launched, exact, feature_maps):
    config = LinearizeConfig.from_dict(
        {
            "attention": {"window_size": 8, "exact": exact},
            "data": {"sequence_length": TOKENS},
            "transfer": {"micro_batch_size": BATCH, "batch_size": BATCH},
            "adjust": {"micro_batch_size": BATCH, "batch_size": BATCH, "train_feature_maps": feature_maps},
        }
    )
    shape = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = convert(LlamaForCausalLM(LlamaConfig(**shape, **heads)), config.attention)
    run_transfer(model.config, config, model.device)
    run_adjust(model.config, config, model.device)
    ahead = set(launched)
    launched.clear()

    data = PackedDataset(np.ones((BATCH, TOKENS), np.int32), np.ones((BATCH, TOKENS), bool), None, {})
    batch = data.batch([0, 1])
    stage = TransferStage(model, config.transfer, data)
    stage.micro_step(batch, 1.0)
    stage.evaluate()
    with torch.no_grad():
        model(input_ids=batch["input_ids"], use_cache=False, attention_call=AttentionCall())
    AdjustStage(model, config.adjust, data).micro_step(batch, 1.0)
    assert len(ahead) > 10
    assert launched == ahead

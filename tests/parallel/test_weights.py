"""Writing a model weight by weight gives the files of save_pretrained."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lolcats.config import AdjustSection, LinearizeConfig, ModelSection, merge
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert, load_base_model
from lolcats.errors import UserError
from lolcats.export import export, export_sharded
from lolcats.pipeline import linearize
from lolcats.training.lora import add_lora


@pytest.fixture
def adapted(model_dir):
    """A new model with adapters that do something, and its tokenizer; the same at every call."""

    def build():
        base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device="cpu", dtype="float32"))
        torch.manual_seed(0)
        model = add_lora(convert(base, AttentionConfig(window_size=4)), AdjustSection())
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        return model, tokenizer

    return build


@pytest.mark.parametrize("merge_lora", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_files_are_those_of_export(adapted, tmp_path, merge_lora, dtype):
    common = {"report": {}, "card": "", "merge_lora": merge_lora, "dtype": dtype}
    export_sharded(*adapted(), tmp_path / "parts", shard_bytes=20_000, **common)
    export(*adapted(), tmp_path / "whole", **common)
    shards = list((tmp_path / "parts").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 25_000 for path in shards)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "parts").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "parts" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert (tmp_path / "parts" / "adapter" / "adapter_model.safetensors").exists() is not merge_lora


def test_four_bits_are_refused_where_they_cannot_be(settings, tmp_path, monkeypatch):
    four = merge(settings, {"model": {"load_in_4bit": True}})
    full = LinearizeConfig.from_dict(merge(four, {"adjust": {"method": "full"}}))
    with pytest.raises(UserError, match=r"adjust.method=full trains all weights"):
        linearize(full, tmp_path / "out", console=Console(quiet=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'lolcats\[quant\]'"):
        load_base_model(ModelSection(**four["model"]))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_four_bits_end_to_end(settings, tmp_path, model_dir):
    """Trained over rounded weights, exported with exact ones; bitsandbytes needs 64 columns."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model_dir)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "base")
    changes = {"model": {"path": str(tmp_path / "base"), "load_in_4bit": True}}
    linearize(LinearizeConfig.from_dict(merge(settings, changes)), tmp_path / "out", console=Console(quiet=True))
    base, made = load_file(tmp_path / "base" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name, tensor in base.items() if not torch.equal(made[f"model.{name}"], tensor)}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")

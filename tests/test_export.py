"""Exported folders: the files of save_pretrained, swapped in whole."""

import json
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lolcats.checkpoint.verify import reload_check
from lolcats.checkpoint.write import export, stored_weights, whole_weights
from lolcats.config import AdjustSection, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.loading import load_base_model
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


def assert_same_weights(folder, expected):
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(expected).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("form", "ends"), [("chat", True), ("text", False)])
def test_trained_on_conversations_a_model_ends_with_their_turns(adapted, tmp_path, form, ends):
    model, tokenizer = adapted()
    end = tokenizer.convert_ids_to_tokens(5)
    tokenizer.add_special_tokens({"extra_special_tokens": [end]})
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}END{% endfor %}"
    tokenizer.chat_template = template.replace("END", end) + "{% if add_generation_prompt %}assistant {% endif %}"
    before = model.generation_config.eos_token_id
    report = {"data": {"adjust": {"sources": [{"format": form}]}, "positions": 8}}
    export(model, tokenizer, tmp_path / "out", report=report, card="")
    found = json.loads((tmp_path / "out/generation_config.json").read_text()).get("eos_token_id")
    assert found == ([before if before is not None else tokenizer.eos_token_id, 5] if ends else before)


def test_the_folder_is_that_of_save_pretrained(adapted, model_dir, tmp_path, monkeypatch):
    model, tokenizer = adapted()
    monkeypatch.setattr("lolcats.checkpoint.write.SHARD_BYTES", 20_000)
    export(model, tokenizer, tmp_path / "out", report={}, card="")
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 25_000 for path in shards)
    whole = adapted()[0].merge_and_unload()
    whole.save_pretrained(tmp_path / "whole")
    assert_same_weights(tmp_path / "out", tmp_path / "whole")
    stored = stored_weights(model.get_base_model(), model_dir)
    export(model, tokenizer, tmp_path / "stored", report={}, card="", weights=stored)
    assert_same_weights(tmp_path / "stored", tmp_path / "whole")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_lora_is_merged_in_float32(adapted, tmp_path):
    """Two adapters, over weights in bfloat16."""
    model, tokenizer = adapted()
    model.to(torch.bfloat16)
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    projection = model.get_base_model().model.model.layers[1].self_attn.q_proj
    assert projection.active_adapters == ["default", "second"]
    whole, scale = projection.base_layer.weight.float(), 1e-3
    for adapter in projection.active_adapters:
        a, b = projection.lora_A[adapter].float().weight, projection.lora_B[adapter].float().weight
        b.data.normal_(std=scale)
        whole = whole + projection.scaling[adapter] * b @ a
    export(model, tokenizer, tmp_path, report={}, card="")
    written = load_file(tmp_path / "model.safetensors")["model.model.layers.1.self_attn.q_proj.weight"]
    assert written.dtype == torch.bfloat16
    assert torch.equal(written, whole.to(torch.bfloat16))


def test_an_export_replaces_the_one_before_whole(adapted, tmp_path, monkeypatch):
    """Shards and code of the earlier export go; run/ and what others put there stay."""
    output, common = tmp_path / "out", {"report": {}, "card": ""}
    with monkeypatch.context() as patch:
        patch.setattr("lolcats.checkpoint.write.SHARD_BYTES", 20_000)
        export(*adapted(), output, **common)
    kept = {"run/progress.json": "{}", "notes.txt": "mine", "adapters.md": "mine"}
    for name, text in kept.items():
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(text)
    export(*adapted(), output, **common)
    export(*adapted(), tmp_path / "new", **common)
    names = {str(file.relative_to(tmp_path / "new")) for file in (tmp_path / "new").rglob("*") if file.is_file()}
    assert {str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()} == names | kept.keys()
    assert all((output / name).read_text() == text for name, text in kept.items())
    assert_same_weights(output, tmp_path / "new")


def test_a_failed_export_replaces_nothing(adapted, linearized, tmp_path, monkeypatch):
    """One that lacks tensors, whatever its loss, and one on a full disk."""
    output, (model, tokenizer) = tmp_path / "out", adapted()
    export(model, tokenizer, output, report={}, card="before")
    before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
    weights = [item for item in whole_weights(model.get_base_model()) if "q_proj" not in item[0]]
    check = reload_check(model, linearized()[2], batch_size=1, tolerance=float("inf"))
    with pytest.raises(UserError, match=r"missing: \['model.model.layers.0.self_attn.q_proj.weight'"):
        export(model, tokenizer, output, report={}, card="after", weights=weights, check=check)
    full, cannot = OSError(28, "No space left on device"), pytest.raises(UserError, match="No space left")
    tokenizer.save_pretrained = Mock(side_effect=Exception("No space left on device (os error 28)"))
    with cannot:
        export(*adapted()[:1], tokenizer, output, report={}, card="after")
    with pytest.raises(KeyboardInterrupt):
        export(*adapted(), output, report={}, card="after", check=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("lolcats.modeling.model.write_code", Mock(side_effect=full))
    with cannot:
        export(*adapted(), output, report={}, card="after")
    assert {x: x.read_bytes() for x in output.rglob("*") if x.is_file()} == before

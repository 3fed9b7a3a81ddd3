"""Multimodal checkpoints: their language model alone."""

import logging

import pytest
import torch
from family_models import MULTIMODAL, TOLERANCE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lolcats.checkpoint.read import BaseCheckpoint
from lolcats.checkpoint.write import stored_weights
from lolcats.config import ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling import loading
from lolcats.modeling.loading import load_base_model, load_skeleton


@pytest.fixture
def save(kit, tmp_path, monkeypatch):
    """save(family) -> the original model, and its folder for `load_base_model`."""
    monkeypatch.setattr(loading, "load_tokenizer", lambda *arguments: None)

    def saved(family):
        whole = kit.build_multimodal(family)
        try:
            whole(input_ids=kit.tokens(1, 4))
        except AttributeError as error:  # Llama 4 in transformers 5.24
            pytest.skip(f"transformers' own {type(whole).__name__} fails: {error}")
        whole.save_pretrained(tmp_path / "whole")
        return whole, ModelSection(path=str(tmp_path / "whole"), device="cpu")

    return saved


@torch.no_grad()
@pytest.mark.parametrize("family", list(MULTIMODAL))
def test_the_language_model_alone_answers_texts_as_the_whole(save, kit, tmp_path, family):
    """Loaded, read block by block, linearized, and saved under its own names."""
    whole, section = save(family)
    input_ids = kit.tokens(2, 20)
    expected = whole(input_ids=input_ids).logits
    base, _ = load_base_model(section)
    torch.testing.assert_close(base(input_ids).logits, expected, **TOLERANCE)

    skeleton = load_skeleton(section)
    checkpoint = BaseCheckpoint(skeleton, tmp_path / "whole")
    checkpoint.load(["model"], torch.device("cpu"))
    for name, weight in skeleton.model.state_dict().items():
        assert torch.equal(weight, base.model.state_dict()[name]), name

    base.save_pretrained(tmp_path / "base")
    assert torch.equal(_loaded(tmp_path / "base")(input_ids).logits, base(input_ids).logits)
    model = convert(base, AttentionConfig(window_size=20))
    torch.testing.assert_close(model(input_ids).logits, expected, **TOLERANCE)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(_loaded(tmp_path / "saved")(input_ids).logits, model(input_ids).logits)
    files = load_file(tmp_path / "saved" / "model.safetensors")
    stored = dict(stored_weights(model, tmp_path / "whole"))
    assert stored.keys() == files.keys()
    assert all(torch.equal(files[name], weight) for name, weight in stored.items())


def _loaded(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def test_what_is_left_out_is_said_and_what_is_missing_refused(save, tmp_path, caplog):
    _, section = save("gemma3")
    with caplog.at_level(logging.WARNING):
        load_base_model(section)
    assert "(gemma3): its language model alone (gemma3_text)" in caplog.text
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    del weights[next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))]
    save_file(weights, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"is incomplete: .*model\.layers\.1\.mlp\.up_proj"):
        load_base_model(section)

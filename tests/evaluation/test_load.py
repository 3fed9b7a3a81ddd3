"""Loading base models, linearized folders and folders with an adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from lolcats.config import AttentionSection, DataSection, ModelSection
from lolcats.conversion import convert, load_base_model
from lolcats.data import PackedDataset
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.evaluation.perplexity import dataset_perplexity, perplexity
from lolcats.modeling import LolcatsForCausalLM

INPUT_IDS = torch.arange(2, 22)[None]


@pytest.fixture
def linearized(model_dir):
    base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device="cpu"))
    return convert(base, AttentionSection(window_size=2)), tokenizer


@torch.no_grad()
def logits(model):
    return model.eval()(INPUT_IDS, use_cache=False).logits


def test_a_base_model(model_dir):
    model, tokenizer = load_model(model_dir, device="cpu", dtype="bfloat16")
    assert model.config.model_type == "llama"
    assert model.dtype == torch.bfloat16
    assert tokenizer("w0")["input_ids"] == [2]


def test_a_linearized_folder(linearized, tmp_path):
    model, tokenizer = linearized
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path, device="cpu", dtype="float32")
    assert isinstance(loaded, LolcatsForCausalLM)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


def test_an_adapter_in_the_folder_is_applied(linearized, tmp_path):
    model, tokenizer = linearized
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = logits(model)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    expected = logits(adapted)
    assert (expected - plain).abs().max() > 1e-3  # the adapter does something
    loaded, _ = load_model(tmp_path, device="cpu", dtype="float32")
    torch.testing.assert_close(logits(loaded), expected)  # merging rounds differently


def test_perplexity_is_the_exponential_of_the_mean_loss(linearized, data_file, tmp_path, monkeypatch):
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path))
    model, tokenizer = linearized
    section = DataSection.model_validate(
        {"sources": [{"path": str(data_file), "max_rows": 8}], "sequence_length": 16, "loss_on": "all"}
    )
    result = perplexity(model, tokenizer, section, batch_size=2)
    assert result["perplexity"] == pytest.approx(torch.tensor(result["loss"]).exp().item(), rel=1e-6)
    again = perplexity(model, tokenizer, section, batch_size=5)
    assert again["tokens"] == result["tokens"] > 0
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-5)  # other batches, other order of addition


def test_data_without_labels_have_no_perplexity(linearized):
    """Not 1.0, the exponential of no loss at all."""
    ids = np.zeros((2, 8), dtype=np.int32)
    with pytest.raises(UserError, match=r"none of the 2 sequences has a label.*--loss-on all"):
        dataset_perplexity(linearized[0], PackedDataset(ids, np.zeros(ids.shape, dtype=np.bool_)))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("/no/such/folder", {}, "not found"),
        ("MODEL", {"dtype": "int8"}, r"model\.dtype"),
        ("MODEL", {"device": "toaster"}, "toaster"),
    ],
)
def test_mistakes(model_dir, path, options, message):
    with pytest.raises(UserError, match=message):
        load_model(model_dir if path == "MODEL" else path, **options)

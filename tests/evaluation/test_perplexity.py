"""Loading any model, and perplexity of packed sequences."""

import numpy as np
import pytest
import torch

from lolcats.config import DataSection, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.data import PackedDataset, build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.loading import load_base_model


@pytest.fixture
def linearized(model_dir):
    base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device="cpu"))
    return convert(base, AttentionConfig(window_size=2)), tokenizer


def test_a_base_model(model_dir):
    model, tokenizer = load_model(model_dir, device="cpu", dtype="bfloat16")
    assert (model.config.model_type, model.dtype) == ("llama", torch.bfloat16)
    assert tokenizer("w0")["input_ids"] == [2]


def test_perplexity_is_the_exponential_of_the_mean_loss(linearized, data_file):
    model, tokenizer = linearized
    section = DataSection.model_validate(
        {"sources": [{"path": str(data_file), "max_rows": 8}], "sequence_length": 16, "loss_on": "all"}
    )
    packed = build_evaluation_dataset(section, tokenizer)
    result = dataset_perplexity(model, packed, batch_size=2)
    assert result["perplexity"] == pytest.approx(torch.tensor(result["loss"]).exp().item(), rel=1e-6)
    again = dataset_perplexity(model, packed, batch_size=5)
    assert again["tokens"] == result["tokens"] > 0
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-5)  # other batches, other order of addition


def test_data_without_labels_have_no_perplexity(linearized):
    """Not 1.0, the exponential of no loss at all."""
    ids = np.zeros((2, 8), dtype=np.int32)
    with pytest.raises(UserError, match=r"none of the 2 sequences has a label.*--loss-on all"):
        dataset_perplexity(linearized[0], PackedDataset(ids, np.zeros(ids.shape, dtype=np.bool_)))

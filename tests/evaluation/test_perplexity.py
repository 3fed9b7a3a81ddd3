"""Loading any model, and perplexity of packed sequences and of a text by position."""

import math

import numpy as np
import pytest
import torch

from lolcats.config import DataSection, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.data import PackedDataset, build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation import perplexity as evaluation
from lolcats.evaluation.load import load_model
from lolcats.evaluation.perplexity import dataset_perplexity, text_perplexity
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


# --- a text in windows ---------------------------------------------------------------------------------------------


def text(length: int, every: int = 1):
    draw = np.random.default_rng(length)
    return draw.integers(1, 320, length).astype(np.int32), np.arange(length) % every == 0


@torch.no_grad()
def expected_losses(model, ids, labels, room, begin_with):
    """Losses by place in the window, each window in a forward pass of its own."""
    by_place: dict[int, list[float]] = {}
    for begin in range(0, len(ids), room):
        window = [begin_with] * (begin_with is not None) + ids[begin : begin + room].tolist()
        offset = len(window) - len(ids[begin : begin + room])
        tokens = torch.tensor(window)[None]
        log_p = model(tokens, use_cache=False).logits[0].log_softmax(-1)
        for place in range(offset + 1, len(window)):
            if labels[begin + place - offset]:
                by_place.setdefault(place, []).append(-float(log_p[place - 1, window[place]]))
    return by_place


@pytest.mark.parametrize(
    ("max_length", "begin_with", "batch_size", "piece"), [(50, None, 1, 2048), (50, 7, 3, 16), (300, None, 2, 7)]
)
def test_losses_are_those_of_whole_windows(any_model, max_length, begin_with, batch_size, piece, monkeypatch):
    monkeypatch.setattr(evaluation, "PIECE", piece)
    ids, labels = text(161, every=3)
    settings = {"max_length": max_length, "begin_with": begin_with}
    found = text_perplexity(any_model, ids, labels, **settings, batch_size=batch_size)
    by_place = expected_losses(any_model, ids, labels, max_length - (begin_with is not None), begin_with)
    every = [loss for losses in by_place.values() for loss in losses]
    assert found["tokens"] == len(every)
    assert found["loss"] == pytest.approx(np.mean(every), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert sum(entry["tokens"] for entry in found["positions"]) == len(every)
    for entry in found["positions"]:
        inside = [x for place in range(entry["start"], entry["end"]) for x in by_place.get(place, [])]
        assert entry["loss"] == pytest.approx(np.mean(inside), rel=1e-3)


def test_nothing_to_score(linear_model):
    for ids, labels in (text(10, every=11), text(0)):
        with pytest.raises(UserError, match="no token to score"):
            text_perplexity(linear_model, ids, labels, max_length=20)

"""FLOPs against those that PyTorch counts while the training code runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lolcats.config import AdjustSection, TransferSection
from lolcats.data import PackedDataset
from lolcats.plan import work
from lolcats.training.adjust import AdjustStage
from lolcats.training.transfer import TransferStage

SEQUENCES, LENGTH, RANK = 2, 64, 4
TOKENS = SEQUENCES * LENGTH


def matrix_products(run) -> int:
    """FLOPs of linear layers: products of two matrices; attention multiplies batches of them."""
    with FlopCounterMode(display=False) as counter:
        run()
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


def dataset() -> PackedDataset:
    tokens_NT = np.random.default_rng(0).integers(128, size=(SEQUENCES, LENGTH), dtype=np.int32)
    return PackedDataset(tokens_NT, np.ones(tokens_NT.shape, dtype=np.bool_))


def attention_flops(shape, linear: float, softmax: float) -> float:
    hybrid = sum(work.hybrid_flops(layer, LENGTH, shape.mean_window) for layer in shape.layers if layer.linear)
    full = sum(work.softmax_flops(layer, LENGTH) for layer in shape.layers if not layer.linear)
    return linear * hybrid + softmax * full


def test_frozen_forward(tiny):
    case = tiny(3)
    tokens_BT = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
    with torch.no_grad(), case.model.attention_mode("softmax"):
        counted = matrix_products(lambda: case.model.get_decoder()(input_ids=tokens_BT, use_cache=False))
    layers = case.shape.layers
    softmax = sum(work.softmax_flops(layer, LENGTH) for layer in layers)
    assert counted == TOKENS * (work.frozen(layers, LENGTH) - softmax)


@pytest.mark.parametrize("keep", [(), (2,)], ids=["all", "last stays softmax"])
def test_transfer_ends_in_the_last_linearized_layer(tiny, keep):
    case = tiny(3, keep)
    data = dataset()
    stage = TransferStage(case.model, TransferSection(batch_size=2, micro_batch_size=2), data)
    counted = matrix_products(lambda: stage.micro_step(data.batch(np.arange(SEQUENCES)), 1.0))
    layers = case.shape.layers
    planned = work.transfer(layers, LENGTH, case.shape.mean_window)
    ran = layers[:3] if not keep else layers[:2]
    softmax = sum(work.softmax_flops(layer, LENGTH) for layer in ran)
    assert counted == TOKENS * (planned - softmax - attention_flops(case.shape, 3, 0))


@pytest.mark.parametrize(
    ("options", "heads"),
    [({}, 2), ({"distill_factor": 0.5}, 7), ({"train_feature_maps": True}, 2)],
    ids=["plain", "divergence", "feature maps"],
)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("keep", [(), (0,)], ids=["all", "first stays softmax"])
def test_adjust(tiny, keep, checkpointing, options, heads):
    case = tiny(3, keep)
    data = dataset()
    config = AdjustSection(
        batch_size=2, micro_batch_size=2, lora_rank=RANK, gradient_checkpointing=checkpointing, **options
    )
    stage = AdjustStage(case.model, config, data)
    counted = matrix_products(lambda: stage.micro_step(data.batch(np.arange(SEQUENCES)), 1.0))
    # The first layer, if it stays softmax, has a backward pass only with checkpointing.
    planned = work.adjust(case.shape, LENGTH, config) - attention_flops(
        case.shape, *((4, 4) if checkpointing else (3, 1))
    )
    if not config.train_feature_maps:
        planned += sum(work.map_flops(layer) for layer in case.shape.layers if layer.linear)
    if config.distill_factor:
        softmax = sum(work.softmax_flops(layer, LENGTH) for layer in case.shape.layers)
        planned += work.teacher(case.shape, LENGTH, config) - softmax
    # A sequence's last token predicts nothing.
    head = heads * 2 * case.shape.hidden * case.shape.vocabulary
    assert counted == pytest.approx(TOKENS * planned - SEQUENCES * head, rel=1e-9)


def test_no_teacher_without_a_loss_that_compares(tiny):
    case = tiny(2)
    assert work.teacher(case.shape, LENGTH, AdjustSection()) == 0


def test_softmax_flops_are_the_mean_over_causal_keys(tiny):
    (layer,) = tiny(1).shape.layers
    per_key = 4 * layer.heads * layer.head_dim
    assert work.softmax_flops(layer, 5) == per_key * (1 + 2 + 3 + 4 + 5) / 5

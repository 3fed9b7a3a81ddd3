"""FLOPs and bytes: against what PyTorch counts on a tiny model, and against measured runs."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lolcats.config import AdjustSection, GatesSection, TransferSection
from lolcats.data import PackedDataset
from lolcats.modeling.call import SOFTMAX
from lolcats.plan import costs
from lolcats.plan.costs import Step
from lolcats.plan.gpus import find_gpu
from lolcats.plan.ways import CHECKPOINTING, REPLICATED, Request, best_way
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.finetune import AdjustStage
from lolcats.training.head_gates import GateStage

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STEP = Step(2, 64, element=4)


def dataset() -> PackedDataset:
    shape = (STEP.sequences, STEP.length)
    tokens_NT = np.random.default_rng(0).integers(128, size=shape, dtype=np.int32)
    return PackedDataset(tokens_NT, np.ones(shape, dtype=np.bool_))


def matrix_products(run) -> int:
    """FLOPs of linear layers: products of two matrices; attention multiplies batches of them."""
    with FlopCounterMode(display=False) as counter:
        run()
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


def attention_flops(shape) -> tuple[float, float]:
    """Of all layers: hybrid and softmax."""
    hybrid = sum(costs.hybrid_flops(layer, STEP.length, shape.mean_window) for layer in shape.layers)
    return hybrid, sum(costs.softmax_flops(layer, STEP.length) for layer in shape.layers)


def test_flops_of_stage_1(tiny):
    case = tiny(3)
    data = dataset()
    stage = TransferStage(case.model, TransferSection(batch_size=2, micro_batch_size=2), data)
    counted = matrix_products(lambda: stage.micro_step(data.batch(np.arange(STEP.sequences)), 1.0))
    planned = costs.transfer_flops(case.shape.layers, STEP.length, case.shape.mean_window)
    hybrid, softmax = attention_flops(case.shape)
    assert counted == STEP.tokens * (planned - 3 * hybrid - softmax)


@pytest.mark.parametrize("options", [{}, {"distill_factor": 0.5}, {"gradient_checkpointing": True}], ids=str)
def test_flops_of_stage_2(tiny, options):
    case = tiny(3)
    data = dataset()
    config = AdjustSection(batch_size=2, micro_batch_size=2, lora_rank=4, **options)
    stage = AdjustStage(case.model, config, data)
    counted = matrix_products(lambda: stage.micro_step(data.batch(np.arange(STEP.sequences)), 1.0))
    hybrid, softmax = attention_flops(case.shape)
    planned = costs.adjust_flops(case.shape, STEP.length, config)
    planned -= hybrid * (4 if config.gradient_checkpointing else 3)
    if config.distill_factor:
        planned += costs.frozen_flops(case.shape.layers, STEP.length) - softmax
    # The plan rounds up: a sequence's last token has no label, the first layer's inputs no gradient, and checkpointing
    # does not repeat the last projection.
    assert 0.85 * STEP.tokens * planned < counted < 1.05 * STEP.tokens * planned


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_of_gates(tiny, checkpointing):
    case = tiny(3)
    data = dataset()
    config = GatesSection(batch_size=2, micro_batch_size=2, gradient_checkpointing=checkpointing)
    stage = GateStage(case.model, config, data)
    counted = matrix_products(lambda: stage.micro_step(data.batch(np.arange(STEP.sequences)), 1.0))
    hybrid, softmax = attention_flops(case.shape)
    planned = costs.gates_flops(case.shape, STEP.length, gradient_checkpointing=checkpointing)
    planned -= (4 if checkpointing else 3) * (hybrid + softmax)
    planned += costs.frozen_flops(case.shape.layers, STEP.length) - softmax
    # As in stage 2; and the queries, keys and values of the first layer have no gradient.
    assert 0.85 * STEP.tokens * planned < counted < 1.05 * STEP.tokens * planned


def test_exact_heads_cost_their_share_of_softmax(tiny):
    shape = tiny(2).shape
    softmax = shape.softmax
    mixed = tiny(2, ("0.1", "1.0")).shape
    assert (mixed.exact_heads, mixed.feature_parameters) == (2, shape.feature_parameters / 2)
    tokens = 4096
    ends = [costs.forward_flops(which, tokens) for which in (shape, softmax)]
    assert costs.forward_flops(mixed, tokens) == pytest.approx(sum(ends) / 2)
    assert costs.forward_flops(softmax, tokens) == costs.frozen_flops(shape.layers, tokens)
    adjust = [costs.adjust_flops(which, tokens, AdjustSection()) for which in (shape, mixed, softmax)]
    assert adjust == sorted(adjust)
    students = [
        costs.transfer_flops(which.layers, tokens, which.mean_window) - costs.frozen_flops(which.layers, tokens)
        for which in (shape, mixed, softmax)
    ]
    assert students == [students[0], pytest.approx(students[0] / 2), 0]


def test_softmax_flops_are_the_mean_over_causal_keys(tiny):
    (layer,) = tiny(1).shape.layers
    per_key = 4 * layer.heads * layer.head_dim
    assert costs.softmax_flops(layer, 5) == per_key * (1 + 2 + 3 + 4 + 5) / 5


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations made and somebody still holds; a model's parameters do not count."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.held = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage) -> None:
        address = storage._cdata
        if address in self.held:
            return
        self.held.add(address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self.held.discard(address)
        self.now -= size


def test_live_activations_of_the_frozen_forward_pass(tiny):
    case = tiny(3, intermediate_size=128)
    tokens_BT = torch.zeros(STEP.sequences, STEP.length, dtype=torch.int64)
    with torch.no_grad(), Live(case.model) as live:
        case.model.get_decoder()(input_ids=tokens_BT, use_cache=False, attention_call=SOFTMAX)
    # Positions and rotary tables come on top.
    assert live.peak == pytest.approx(costs.frozen_bytes(case.shape.layers[0], case.shape, STEP), rel=0.03)


def test_live_bytes_of_stage_2_with_divergence(tiny):
    """Where the vocabulary is large, five floats of every logit are most of the memory."""
    case = tiny(2, vocab_size=8192)
    config = AdjustSection(batch_size=2, micro_batch_size=2, lora_rank=4, distill_factor=0.5)
    data = dataset()
    stage = AdjustStage(case.model, config, data)
    with Live(stage.model) as live:
        stage.micro_step(data.batch(np.arange(STEP.sequences)), 1.0)
    held = costs.adjust_memory(case.shape, STEP, config)
    assert live.peak == pytest.approx(held.activations + held.logits, rel=0.1)  # attention without kernels keeps more


def test_live_bytes_of_gates(tiny):
    case = tiny(2, vocab_size=8192)
    data = dataset()
    stage = GateStage(case.model, GatesSection(batch_size=2, micro_batch_size=2), data)
    with Live(stage.model) as live:
        stage.micro_step(data.batch(np.arange(STEP.sequences)), 1.0)
    held = costs.gates_memory(case.shape, STEP, gradient_checkpointing=False)
    assert live.peak == pytest.approx(held.activations + held.logits, rel=0.1)  # as above


def test_less_is_kept_by_fused_kernels_checkpointing_and_frozen_layers(tiny):
    shape, config = tiny(8).shape, AdjustSection(lora_rank=4)
    unfused, fused = (costs.adjust_memory(replace(shape, fused=known), STEP, config) for known in (False, True))
    again = costs.adjust_memory(shape, STEP, config.model_copy(update={"gradient_checkpointing": True}))
    later = costs.adjust_memory(tiny(8, (0, 1, 2, 3)).shape, STEP, config)
    assert fused.activations < unfused.activations
    assert again.activations < fused.activations / 2
    assert later.activations < 0.6 * fused.activations
    assert fused.peak == sum(vars(fused).values())


def measured_runs():
    """Stages measured by `benchmarks/train.py`, and by `scaling.py` up to 2026-11-22, in micro-steps of 8192 tokens or
    of large models; later files of `scaling.py` have the plan of each row in them."""
    for path in sorted([*RESULTS.glob("train_*.json"), *RESULTS.glob("scaling_*.json")]):
        report = json.loads(path.read_text())
        if isinstance(report["rows"], dict):
            continue
        settings = report["settings"]
        train, gpus = settings.get("train", settings), report.get("processes", 1)
        for row in report["rows"]:
            large = train["model"] != "smollm2-135m"
            if row["row"] in ("transfer", "adjust") and (large or row["micro_batch"] >= 8):
                name = f"{path.stem}, {row['row']} {row['micro_batch']}"
                marks = [pytest.mark.slow] if "405b" in name else []
                yield pytest.param(train, settings, gpus, row, id=name, marks=marks)


@pytest.mark.parametrize(("train", "settings", "gpus", "row"), list(measured_runs()))
def test_measured_runs(train, settings, gpus, row, known_shape):
    shape = known_shape(train["model"])
    shape = replace(shape, layers=shape.layers[: settings.get("layers")])
    request = Request(
        find_gpu("h200"),
        gpus=gpus,
        sequence_length=row["tokens"],
        batch_size=row["micro_batch"] * gpus,
        micro_batch_size=row["micro_batch"],
    )
    options = (REPLICATED,) if gpus > 1 and not settings["sharded"] else ()
    if row["row"] == "adjust" and train["gradient_checkpointing"]:
        options += (CHECKPOINTING,)
    mode = {"transfer": ("joint", "sharded"), "adjust": ("lora", "lora-sharded")}[row["row"]][gpus > 1]
    way = best_way(shape, request, mode, options)
    peak = row["peak_gib"] if isinstance(row["peak_gib"], float) else max(row["peak_gib"])
    planned = way.memory.peak - way.memory.validation
    # Kernels that an earlier run has tuned need no buffer for it.
    small = train["model"] == "smollm2-135m"  # fixed buffers count
    deviations = [planned / (peak * 2**30) - 1, (planned - costs.TUNING) / (peak * 2**30) - 1]
    assert min(map(abs, deviations)) < (0.2 if small else 0.1)
    hours = request.trained_tokens / row["tokens_per_second"] / 3600
    # Utilisation is one number a hidden size: larger micro-batches of the small model reach more.
    assert way.hours == pytest.approx(hours, rel=0.4 if small else 0.2)

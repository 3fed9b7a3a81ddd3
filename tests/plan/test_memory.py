"""The memory formulas against what really lives, on the CPU in float32."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lolcats.blockwise.spool import Spool
from lolcats.plan import memory
from lolcats.plan.memory import Step
from lolcats.training.lora import add_lora

STEP = Step(2, 64, element=4, graphs=False)


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


def saved_bytes(case) -> int:
    """What autograd keeps between the forward and the backward pass of the decoder, parameters left out."""
    model = add_lora(case.model, case.adjust)
    for _, module in case.model.linear_layers():
        module.requires_grad_(False)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens_BT = torch.zeros(STEP.sequences, STEP.length, dtype=torch.int64)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with case.model.attention_mode("softmax"), hooks:
        output = model.base_model.model.get_decoder()(input_ids=tokens_BT, use_cache=False)[0]
    assert output.requires_grad
    return sum(kept.values())


def test_live_activations_of_the_frozen_forward_pass(tiny):
    case = tiny(3, intermediate_size=128)
    tokens_BT = torch.zeros(STEP.sequences, STEP.length, dtype=torch.int64)
    with torch.no_grad(), case.model.attention_mode("softmax"), Live(case.model) as live:
        case.model.get_decoder()(input_ids=tokens_BT, use_cache=False)
    planned = memory.transfer(case.shape, case.shape.layers, STEP, beside=0)
    # In the plan the student's attention has Triton's tuning buffer; here the MLP is the largest.
    assert planned.activations >= memory.mlp_bytes(case.shape.layers[0], case.shape, STEP)
    # Positions and rotary tables come on top.
    assert live.peak == pytest.approx(memory.mlp_bytes(case.shape.layers[0], case.shape, STEP), rel=0.03)


def test_saved_activations_of_a_layer(tiny):
    cases = [tiny(layers, intermediate_size=128) for layers in (2, 3)]
    difference = saved_bytes(cases[1]) - saved_bytes(cases[0])
    shape = replace(cases[1].shape, fused=False)
    planned = memory.saved(shape.layers[2], shape, STEP, cases[1].adjust.lora_rank)
    # On the CPU without kernels: their two more sums of a query and head are not there.
    planned -= STEP.tokens * 2 * memory.FLOAT * shape.layers[2].heads
    assert difference == pytest.approx(planned, rel=0.02)


def test_fused_norms_and_activations_keep_less(tiny):
    shape = tiny(2).shape
    step = Step(2, 64)
    unfused, fused = (memory.saved(shape.layers[0], replace(shape, fused=known), step, 8) for known in (False, True))
    assert fused < unfused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_spool_bytes_are_those_of_a_spool(tmp_path, dtype):
    sequences, tokens, hidden = 5, 8, 12
    spool = Spool(tmp_path / "spool", np.arange(sequences), tokens, hidden, dtype)
    spool.write(np.arange(sequences), torch.randn(sequences, tokens, hidden))
    spool.close()
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert memory.spool_bytes(sequences * tokens, tokens, hidden, dtype.itemsize) == on_disk


def test_parts_add_up(tiny):
    case = tiny(2)
    held = memory.adjust(case.shape, STEP, 4, checkpointing=False)
    assert held.weights == 4 * case.shape.parameters
    assert held.trained == 4 * (case.shape.lora_parameters(4) + case.shape.feature_parameters)
    assert held.total == sum(vars(held).values())


def test_checkpointing_keeps_the_layers_inputs_only(tiny):
    case = tiny(8)
    kept, made_again = (memory.adjust(case.shape, STEP, 4, checkpointing=on).activations for on in (False, True))
    assert made_again < kept / 2


def test_shards_and_offloading(tiny):
    case = tiny(4)
    whole = memory.transfer(case.shape, case.shape.layers, STEP, beside=0)
    two, four = (memory.sharded(whole, case.shape, STEP, gpus, offload=False) for gpus in (2, 4))
    assert whole.weights == 2 * two.weights == 4 * four.weights
    assert memory.sharded(whole, case.shape, STEP, 4, offload=True).weights == 0
    assert two.buffers > whole.buffers
    assert two.trained == whole.trained  # feature maps are on every GPU

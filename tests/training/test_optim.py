import math

import pytest
import torch
from torch import nn
from toy_stage import ToyStage, copy_weights, run, toy_config

from lolcats.training.optim import BlockOptimizer
from lolcats.training.stage import weights_of


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": nn.Parameter(torch.randn(3, 2, generator=generator)),
        "b": nn.Parameter(torch.randn(4, generator=generator)),
    }


def set_gradients(group, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in group.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


@pytest.mark.parametrize("factors", [{}, {"a": 0.01}])
def test_equals_plain_adamw_with_clipping_and_own_rates(factors):
    """As an optimizer for each parameter would, clipped together; also after a resume, which orders by factor."""
    config = toy_config(schedule="cosine", min_lr=0, clip_norm=0.5, weight_decay=0.1)
    ours, theirs = parameters(), parameters()
    block = BlockOptimizer(ours, config, 10, factors)
    separate = {name: torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1) for name, parameter in theirs.items()}
    for step in range(6):
        if step == 3:
            before, block = block, BlockOptimizer(ours, config, 10, factors)
            block.load({name: tensor.clone() for name, tensor in before.tensors().items()}, before.plateau)
        for group in (ours, theirs):
            set_gradients(group, step)
        expected = {name: parameter.grad.norm() for name, parameter in theirs.items()}
        names, norms_P = block.step(step)
        torch.testing.assert_close(dict(zip(names, norms_P, strict=True)), expected)
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        for name, adamw in separate.items():
            adamw.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 10)) * factors.get(name, 1.0)
            adamw.step()
    for name in ours:
        # the total norm is summed in another order
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
        assert ours[name].grad is None
    assert sorted(block.tensors()) == [
        f"{name}/{entry}" for name in ("a", "b") for entry in ("exp_avg", "exp_avg_sq", "step")
    ]


@pytest.mark.parametrize("patience", [0, 2])
def test_plateau_follows_torch(patience):
    config = toy_config(plateau_patience=patience, plateau_factor=0.3, min_lr=1e-3)
    block = BlockOptimizer(parameters(), config, 10)
    adamw = torch.optim.AdamW(parameters().values(), lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        adamw, factor=0.3, patience=patience, min_lr=1e-3, threshold=1e-4
    )
    generator = torch.Generator().manual_seed(0)
    rates = set()
    for index in range(60):
        # falling noise, with differences below the threshold of 1e-4 now and then
        value = 1.0 + 2.0 ** (-index / 5) * float(torch.rand((), generator=generator))
        block.evaluated(value)
        theirs.step(value)
        assert block.lr(index) == pytest.approx(adamw.param_groups[0]["lr"], rel=1e-12)
        rates.add(block.lr(index))
    assert len(rates) > 3
    assert min(rates) == 1e-3


@pytest.mark.parametrize("schedule", ["plateau", "cosine"])
def test_the_floor_is_never_above_the_rate(schedule):
    block = BlockOptimizer(parameters(), toy_config(schedule=schedule, lr=1e-6, min_lr=1e-5), 4)
    for update in range(4):
        block.evaluated(1.0)
        assert block.lr(update) == pytest.approx(1e-6, rel=1e-12)


def test_parameters_without_gradient_stay():
    group = parameters()
    before = group["b"].detach().clone()
    block = BlockOptimizer(group, toy_config(), 10)
    group["a"].grad = torch.ones(3, 2)
    names, norms_P = block.step(0)
    assert names == ("a",)
    assert norms_P.tolist() == pytest.approx([6**0.5])
    assert torch.equal(group["b"], before)
    assert block.step(1)[0] == ()


def test_the_loop_takes_the_stages_factors(tmp_path):
    plain, slow = ToyStage(), ToyStage()
    slow.lr_factors = {"layers.0.weight": 1e-6}
    start = copy_weights(slow)
    for stage in (plain, slow):
        run(stage, tmp_path / str(id(stage)), seed=3, clip_norm=None)
    torch.testing.assert_close(weights_of(slow)["layers.0.weight"], start["layers.0.weight"], rtol=0, atol=1e-4)
    assert torch.equal(weights_of(slow)["layers.1.weight"], weights_of(plain)["layers.1.weight"])
    assert not torch.isclose(weights_of(plain)["layers.0.weight"], start["layers.0.weight"], atol=1e-2).all()

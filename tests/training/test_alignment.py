"""Hidden-state alignment: the distance, which layers, and its place in the loss of stage 2."""

from __future__ import annotations

import pytest
import torch

from lolcats.errors import UserError
from lolcats.training.alignment import compared_layers, hidden_states, relative_distance


def test_distance_is_relative_by_token():
    student, teacher = (torch.randn(2, 2, 3, 5) for _ in range(2))  # layers, B, T, D
    teacher[0, 0, 0] *= 300.0  # a first token's outlier weighs no more than others
    tokens = [
        float(((s - t) @ (s - t)) / (t @ t))
        for s, t in zip(student.reshape(-1, 5), teacher.reshape(-1, 5), strict=True)
    ]
    assert float(relative_distance(list(student), list(teacher))) == pytest.approx(sum(tokens) / 12)
    assert relative_distance(list(teacher), list(teacher)) == 0
    assert torch.isfinite(relative_distance([student[0]], [torch.zeros(2, 3, 5)]))
    with pytest.raises(ValueError, match="zip"):
        relative_distance(list(student), [teacher[0]])


def test_every_so_many_layers(linearized):
    model, *_ = linearized(keep_softmax=[0])
    layers = list(model.get_decoder().layers)
    assert compared_layers(model, 1) == layers
    assert compared_layers(model, 2) == layers[1:]
    with pytest.raises(UserError, match="align_every=3 leaves no layer to compare: the model has 2"):
        compared_layers(model, 3)


def test_states_are_the_layers_outputs_and_hooks_end(linearized):
    model, data, _ = linearized()
    inputs = data.batch([0])["input_ids"]
    with torch.no_grad():
        with hidden_states(compared_layers(model, 1)) as states:
            expected = model(input_ids=inputs, output_hidden_states=True, use_cache=False).hidden_states
        model(input_ids=inputs, use_cache=False)
    assert len(states) == 2
    assert torch.equal(states[0], expected[1])
    torch.testing.assert_close(model.get_decoder().norm(states[1]), expected[2])


def test_off_nothing_changes(adjust_stage, gradients):
    plain, data = adjust_stage()
    aligned, _ = adjust_stage(align_factor=0.0, align_every=2)
    values = [stage.micro_step(data.batch(range(2)), 1.0) for stage in (plain, aligned)]
    assert set(values[1]) == {"loss"}
    assert torch.equal(values[0]["loss"], values[1]["loss"])
    found = gradients(aligned)
    assert all(torch.equal(gradient, found[name]) for name, gradient in gradients(plain).items())


def test_it_is_added_to_the_loss(adjust_stage):
    stage, data = adjust_stage(align_factor=3.0)
    with_kl, _ = adjust_stage(align_factor=3.0, distill_factor=0.25)
    plain, _ = adjust_stage(distill_factor=0.25)
    batch = data.batch(range(2))
    values, both, kl = (each.micro_step(batch, 1.0) for each in (stage, with_kl, plain))
    assert values["alignment"] > 1e-4
    torch.testing.assert_close(values["loss"], values["cross_entropy"] + 3.0 * values["alignment"])
    assert torch.equal(both["alignment"], values["alignment"])
    torch.testing.assert_close(both["loss"], kl["loss"] + 3.0 * both["alignment"])
    last, _ = adjust_stage(align_factor=3.0, align_every=2)
    assert not torch.isclose(last.micro_step(batch, 1.0)["alignment"], values["alignment"])


def test_the_teacher_is_softmax_without_adapters(adjust_stage):
    stage, data = adjust_stage(window_size=64, align_factor=1.0)  # a window over everything is softmax
    batch = data.batch(range(2))
    assert stage.micro_step(batch, 1.0)["alignment"] < 1e-8
    for name, parameter in stage.blocks()[0].items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert stage.micro_step(batch, 1.0)["alignment"] > 1e-3


def test_one_teacher_pass_serves_both_losses(adjust_stage):
    for options, passes in (({}, 1), ({"align_factor": 1.0}, 2), ({"align_factor": 1.0, "distill_factor": 0.5}, 2)):
        stage, data = adjust_stage(**options)
        ran = []
        stage.linearized.get_decoder().register_forward_hook(lambda *_, ran=ran: ran.append(1))
        stage.micro_step(data.batch(range(2)), 1.0)
        assert len(ran) == passes


def test_gradient_is_the_slope_of_the_loss(adjust_stage, gradients):
    stage, data = adjust_stage(align_factor=5.0, align_every=2, train_feature_maps=True)
    batch = data.batch(range(2))
    for parameter in stage.blocks()[0].values():
        torch.nn.init.normal_(parameter, std=0.1)
    stage.micro_step(batch, 1.0)
    slopes = gradients(stage)
    directions = {name: gradient / gradient.norm() for name, gradient in slopes.items()}
    sides = []
    for step in (5e-3, -1e-2):  # forward, then back to the other side
        with torch.no_grad():
            for name, parameter in stage.blocks()[0].items():
                parameter += step * directions[name]
        sides.append(float(stage.micro_step(batch, 1.0)["loss"]))
    slope = sum(float((slopes[name] * directions[name]).sum()) for name in slopes)
    assert (sides[0] - sides[1]) / 1e-2 == pytest.approx(slope, rel=2e-2)


def test_recomputed_and_accumulated_gradients_are_the_same(adjust_stage, gradients):
    plain, data = adjust_stage(align_factor=2.0)
    others = [(adjust_stage(align_factor=2.0, gradient_checkpointing=True)[0], [[0, 3]])]
    others.append((adjust_stage(align_factor=2.0, micro_batch_size=1)[0], [[0], [3]]))
    plain.micro_step(data.batch([0, 3]), 1.0)
    for stage, batches in others:
        for rows in batches:
            stage.micro_step(data.batch(rows), 1.0 / len(batches))
        found = gradients(stage)
        for name, gradient in gradients(plain).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)

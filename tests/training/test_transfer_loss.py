"""Where the loss of a layer is measured and in what unit, against the same written differently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lolcats.errors import UserError
from lolcats.training import lora, transfer_loss
from lolcats.training.transfer import VARIANCE_SEQUENCES


def record(stage, inputs):
    """layer -> (attention module, its linear part, q, k, v, softmax output, call)."""
    seen = {}
    attention = dict(zip(sorted(stage.layers), stage.model.attention_modules().values(), strict=True))

    def observe(module, layer_idx, q, k, v, y_softmax, call):
        call = {name: value for name, value in call.items() if name != "sliding_window"}
        seen[layer_idx] = (attention[layer_idx], module, q, k, v, y_softmax, call)

    with stage.model.attention_mode("softmax"), stage.model.observe(observe), torch.no_grad():
        stage.model.get_decoder()(input_ids=inputs, use_cache=False)
    return seen


def flat(y_BHTD):
    """[B * T, H * D], as the output projection gets it."""
    return torch.cat(y_BHTD.unbind(1), dim=-1).reshape(-1, y_BHTD.shape[1] * y_BHTD.shape[3])


def where_measured(attention, y_BHTD, loss_at):
    return attention.o_proj(flat(y_BHTD)) if loss_at == "projection" else flat(y_BHTD)


def expected_variances(stage, loss_at):
    inputs = stage.validation.batch(range(min(VARIANCE_SEQUENCES, len(stage.validation))))["input_ids"]
    with torch.no_grad():
        return {
            index: where_measured(attention, y_softmax.double().float(), loss_at).var(0, correction=0).mean()
            for index, (attention, _, _, _, _, y_softmax, _) in record(stage, inputs).items()
        }


@pytest.mark.parametrize("loss_scale", ["none", "variance"])
@pytest.mark.parametrize("loss_at", ["heads", "projection"])
def test_loss_and_gradients(transfer_stage, gradients, loss_at, loss_scale):
    stage, data = transfer_stage(loss_at=loss_at, loss_scale=loss_scale)
    batch = data.batch(range(2))
    variances = expected_variances(stage, loss_at) if loss_scale == "variance" else {}
    stage.begin_update(0, 0)
    found = stage.micro_step(batch, 1.0)
    local = gradients(stage)

    stage.model.zero_grad()
    losses = {}
    for index, (attention, module, q, k, v, y_softmax, call) in record(stage, batch["input_ids"]).items():
        y, _ = module(q, k, v, **call)
        error = where_measured(attention, y, loss_at) - where_measured(attention, y_softmax, loss_at)
        losses[index] = 1000.0 * error.pow(2).mean() / variances.get(index, 1.0)
    (sum(losses.values()) / 2).backward()
    for index, loss in losses.items():
        torch.testing.assert_close(found["layer_losses"][index], loss.detach(), rtol=1e-4, atol=0)
    for name, gradient in gradients(stage).items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(local[name], gradient, rtol=1e-3, atol=1e-6 * float(gradient.abs().max()))


def test_off_it_is_the_plain_error_to_the_bit(transfer_stage):
    stage, data = transfer_stage()
    batch = data.batch(range(2))
    found = stage.micro_step(batch, 1.0)["layer_losses"]
    for index, (_, module, q, k, v, y_softmax, call) in record(stage, batch["input_ids"]).items():
        error, _ = module(q, k, v, **call, task="output_mse", target=y_softmax)
        assert torch.equal(found[index], 1000.0 * error.detach())
    assert not stage._layer_loss.variances


def test_variances_differ_by_layer_and_are_measured_once(transfer_stage, monkeypatch):
    stage, data = transfer_stage(loss_scale="variance")
    passes, forward = [], stage._forward
    monkeypatch.setattr(stage, "_forward", lambda inputs: (passes.append(len(inputs["input_ids"])), forward(inputs)))
    stage.begin_update(4, 0)  # as after a resume, where no evaluation comes first
    measured = dict(stage._layer_loss.variances)
    assert sum(passes) == min(VARIANCE_SEQUENCES, len(stage.validation))
    assert len({float(value) for value in measured.values()}) == 2
    passes.clear()
    stage.micro_step(data.batch(range(2)), 1.0)
    stage.begin_update(5, 0)
    assert passes == [2]
    stage.evaluate()
    assert stage._layer_loss.variances == measured


@pytest.mark.parametrize("loss_at", ["heads", "projection"])
def test_the_size_of_micro_batches_does_not_matter(transfer_stage, gradients, loss_at):
    whole, data = transfer_stage(loss_scale="variance", loss_at=loss_at)
    parts, _ = transfer_stage(loss_scale="variance", loss_at=loss_at, micro_batch_size=1)
    for stage in (whole, parts):
        stage.begin_update(0, 0)
    whole.micro_step(data.batch(range(2)), 1.0)
    for row in range(2):
        parts.micro_step(data.batch([row]), 0.5)
    for first, second in zip(whole._layer_loss.variances.values(), parts._layer_loss.variances.values(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=0)
    found = gradients(parts)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6 * float(gradient.abs().max()))
    assert whole.evaluate()["loss"] == pytest.approx(parts.evaluate()["loss"], rel=1e-5)


def test_padding_does_not_count(transfer_stage):
    stage, data = transfer_stage(loss_at="projection", loss_scale="variance")
    loss = stage._layer_loss
    _, module, q, k, v, y_softmax, call = record(stage, data.batch(range(2))["input_ids"])[0]
    mask = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    mask[:, -9:] = False
    padded = q, k, v, y_softmax, {**call, "mask": mask}
    cut = *(x[:, :, :-9] for x in (q, k, v, y_softmax)), call
    whole = q, k, v, y_softmax, call

    def scaled(arguments):
        with loss.measuring():
            assert loss(module, *arguments) == 0
        return loss(module, *arguments)

    torch.testing.assert_close(scaled(padded), scaled(cut))
    assert not torch.isclose(scaled(padded), scaled(whole))


def test_an_output_without_variance_has_a_loss():
    moments = transfer_loss._Moments()
    moments.add(torch.ones(1, 5, 3), None)
    assert moments.variance() == pytest.approx(transfer_loss.SMALLEST_VARIANCE)


def test_models_whose_projection_cannot_be_used_are_refused(transfer_stage, linearized, monkeypatch):
    class Linear4bit(nn.Linear):
        pass

    def loss_of(model):
        return transfer_loss.output_projections(model)

    model, *_ = linearized()
    assert len(loss_of(model)) == 2
    attention = list(model.attention_modules().values())[1]
    hook = attention.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))  # a gate, say
    with pytest.raises(UserError, match=r"layers \[1\] change the attention's outputs .* loss_at=heads"):
        loss_of(model)
    hook.remove()
    attention.o_proj.__class__ = Linear4bit
    with pytest.raises(UserError, match=r"plain weights; .*layers.1.self_attn.o_proj is Linear4bit"):
        loss_of(model)
    attention.o_proj.__class__ = nn.Linear
    monkeypatch.setitem(lora._PROJECTIONS, "o", ("absent",))
    with pytest.raises(UserError, match=r"transfer.loss_at: no 'o' projection in .*; its linear layers are k_proj"):
        transfer_stage(loss_at="projection")

"""Stage 2: what trains, what stays, and the distillation loss."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from lolcats.errors import UserError
from lolcats.modeling.attention import AttentionCall
from lolcats.training.finetune import label_rows
from lolcats.training.head import LanguageHead, find_head
from lolcats.training.stage import set_weights, weights_of


def trained_names(stage):
    return set(stage.blocks()[0])


def run(stage, *batches, scale=1.0):
    """The last micro-step's values and the gradients of all."""
    stage.model.zero_grad()
    for batch in batches:
        values = stage.micro_step(batch, scale)
    return values, {name: p.grad.clone() for name, p in stage.blocks()[0].items()}


def close(found, expected):
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "count", "parts"),
    [
        ({}, 2 * 4 * 2, ("lora_",)),  # layers x projections x (A, B)
        (
            {"lora_targets": ["q", "v"], "exact": [0]},
            2 * 2,
            ("1.self_attn.q_proj", "1.self_attn.v_proj"),
        ),
        ({"train_feature_maps": True}, 2 * 4 * 2 + 2 * 3, ("lora_", "linear_attention")),
    ],
    ids=["lora", "targets", "feature-maps"],
)
def test_what_is_trained(adjust_stage, options, count, parts):
    stage, train = adjust_stage(**options)
    names = trained_names(stage)
    assert len(names) == count
    assert all(any(part in name for part in parts) for name in names)
    assert any("linear_attention" in name for name in names) == ("train_feature_maps" in options)
    _, gradients = run(stage, train.batch(range(2)))
    assert {name for name, p in stage.model.named_parameters() if p.grad is not None} == names
    assert all(gradients[name].abs().max() > 0 for name in names if "linear_attention" in name)


def test_unknown_projection_names_what_there_is(adjust_stage, monkeypatch):
    monkeypatch.setattr("lolcats.training.lora._PROJECTIONS", {"q": ("absent",)})
    with pytest.raises(UserError, match=r"no 'q' projection .* k_proj, o_proj, q_proj, v_proj"):
        adjust_stage(lora_targets=["q"])


def test_a_rank_beyond_the_projections_is_refused(adjust_stage):
    with pytest.raises(UserError, match=r"lora_rank=64 .* choose at most 16"):
        adjust_stage(lora_rank=64)


def test_feature_maps_may_learn_at_a_rate_of_their_own(adjust_stage):
    assert adjust_stage(train_feature_maps=True)[0].lr_factors == {}
    stage, _ = adjust_stage(train_feature_maps=True, lr=1e-4, feature_lr=1e-3)
    names = {name for name in trained_names(stage) if "linear_attention" in name}
    assert stage.lr_factors == dict.fromkeys(names, pytest.approx(10.0))


def test_loss_is_the_mean_over_sequences_of_next_token_cross_entropy(adjust_stage):
    stage, train = adjust_stage()
    batch = train.batch([0, 3])
    counts = (batch["labels"][:, 1:] != -100).sum(1)
    assert counts[0] != counts[1]  # otherwise a mean over all labels would pass
    logits = stage.linearized(input_ids=batch["input_ids"]).logits[:, :-1]
    expected = [cross_entropy(logits[row], batch["labels"][row, 1:], ignore_index=-100) for row in range(2)]
    torch.testing.assert_close(stage.micro_step(batch, 1.0)["loss"], torch.stack(expected).mean().detach())


def test_distillation_compares_with_the_softmax_teacher(adjust_stage):
    same, train = adjust_stage(window_size=64, distill_factor=0.5)  # a window over everything is softmax
    batch = train.batch(range(2))
    assert same.micro_step(batch, 1.0)["divergence"].abs() < 1e-5
    other, _ = adjust_stage(window_size=4, distill_factor=0.5)
    values = other.micro_step(batch, 1.0)
    assert values["divergence"] > 1e-4
    torch.testing.assert_close(values["loss"], 0.5 * values["cross_entropy"] + 0.5 * values["divergence"])
    for name, parameter in same.blocks()[0].items():
        if "lora_B" in name:  # adapters that change the student must leave the teacher alone
            torch.nn.init.normal_(parameter)
    assert same.micro_step(batch, 1.0)["divergence"] > 1e-3


def test_a_distilled_stage_keeps_the_weights_with_the_best_loss(adjust_stage):
    plain, _ = adjust_stage(window_size=4)
    assert plain.metric == "perplexity"
    stage, _ = adjust_stage(window_size=4, distill_factor=0.75)
    found = stage.evaluate()
    assert stage.metric == "loss"
    assert found["perplexity"] == pytest.approx(plain.evaluate()["perplexity"], rel=1e-5)
    labels = divergence = 0.0
    for index in range(len(stage.validation)):
        batch = stage.validation.batch([index])
        hybrid, softmax = (
            stage.linearized(input_ids=batch["input_ids"], attention_call=call).logits[0, :-1].log_softmax(-1)
            for call in (None, AttentionCall(mode="softmax"))
        )
        scored = batch["labels"][0, 1:] != -100
        divergence += (softmax.exp() * (softmax - hybrid)).sum(-1)[scored].sum().item()
        labels += scored.sum().item()
    assert found["divergence"] == pytest.approx(divergence / labels, rel=1e-4)
    assert found["loss"] == pytest.approx(0.75 * divergence / labels + 0.25 * math.log(found["perplexity"]), rel=1e-4)


def test_softmax_control_uses_softmax_attention(adjust_stage):
    control, train = adjust_stage(softmax_control=True)
    softmax, _ = adjust_stage(window_size=64)
    linear, _ = adjust_stage()
    batch = train.batch(range(2))
    torch.testing.assert_close(control.micro_step(batch, 1.0)["loss"], softmax.micro_step(batch, 1.0)["loss"])
    assert not torch.isclose(control.micro_step(batch, 1.0)["loss"], linear.micro_step(batch, 1.0)["loss"])
    assert control.evaluate()["perplexity"] == pytest.approx(softmax.evaluate()["perplexity"], rel=1e-5)


def run_without_parts(stage, batch):
    """`run` with the loss from all logits at once."""
    labels = batch["labels"][:, 1:]
    row, column = (labels != -100).nonzero(as_tuple=True)
    weight = 1.0 / ((labels != -100).sum(1)[row] * len(labels))
    stage.model.train().zero_grad()
    logits = stage.model(input_ids=batch["input_ids"], use_cache=False).logits[row, column]
    loss = cross_entropy(logits, labels[row, column], reduction="none") @ weight
    loss.backward()
    return {"loss": loss.detach()}, {name: p.grad.clone() for name, p in stage.blocks()[0].items()}


def test_the_head_is_found_with_what_follows_it(adjust_stage):
    stage, train = adjust_stage()
    model, base = stage.linearized, stage.linearized.model
    assert find_head(model).softcap is None
    plain = base.forward

    def capped(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = torch.tanh(output.logits / 3.0) * 3.0
        return output

    base.forward = capped
    assert find_head(model).module is None  # the config does not say what happens
    model.config.text_config.final_logit_softcapping = 3.0
    assert find_head(model).softcap == 3.0
    batch = train.batch([0, 3])
    for stage.part in (5, 1000):
        for stage.head in (find_head(model), LanguageHead()):  # the second: logits come from the model
            for found, expected in zip(run(stage, batch), run_without_parts(stage, batch), strict=True):
                close(found, expected)


def test_padded_labels_change_nothing(adjust_stage, monkeypatch):
    stage, train = adjust_stage(distill_factor=0.3)
    batch = train.batch([0, 3])
    expected = run(stage, batch)
    monkeypatch.setattr("lolcats.training.finetune.label_rows", lambda labels, **_: label_rows(labels, padded=True))
    padded, real = label_rows(batch["labels"], padded=True), label_rows(batch["labels"])
    assert len(padded["row_L"]) > len(real["row_L"])
    for found, wanted in zip(run(stage, batch), expected, strict=True):
        close(found, wanted)


@pytest.mark.parametrize("by_labels", [False, True])
def test_few_numbers_of_rows(by_labels):
    """As many as labels or up to twice as many, a handful of numbers in all, and weights that sum up to 1."""
    numbers = set()
    for count in range(255):
        labels = torch.full((2, 128), -100)
        labels.view(-1)[torch.randperm(254)[:count] * 128 // 127 + 1] = 3  # not the first tokens
        found = label_rows(labels, padded=True, by_labels=by_labels)
        numbers.add(len(found["row_L"]))
        assert count <= len(found["row_L"]) <= max(2 * count, 1)
        per_sequence = torch.zeros(256).index_add(0, found["row_L"], found["weight_L"]).view(2, 128).sum(1)
        share = (labels == 3).sum(1) / max(count, 1) if by_labels else (labels == 3).any(1) / 2
        torch.testing.assert_close(per_sequence, share.float())
    assert len(numbers) <= 8 + 5


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"distill_factor": 0.5}, {"gradient_checkpointing": True}])
def test_graphs_equal_plain_micro_steps(adjust_stage, gradients, options):
    said = []
    stage, train = adjust_stage(device="cuda", report=said.append, **options)
    plain, _ = adjust_stage(device="cuda", cuda_graphs="off", **options)
    set_weights(plain, weights_of(stage))
    for _ in range(6):
        for rows in ([0, 3], [1, 2]):
            results = [each.micro_step(train.batch(rows), 0.5) for each in (stage, plain)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        # adds are in another order
        torch.testing.assert_close(gradients(stage), gradients(plain), rtol=1e-2, atol=1e-4)
        stage.model.zero_grad()
        plain.model.zero_grad()
        assert stage.evaluate() == pytest.approx(plain.evaluate(), rel=1e-5)  # padded products round otherwise
        for each in (stage, plain):
            for weight in weights_of(each).values():
                weight.mul_(1.1)
    assert said == []
    assert len(stage.graphs._captured) >= 2  # evaluations, too

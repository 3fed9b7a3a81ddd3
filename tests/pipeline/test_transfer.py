"""Stage 1: the local backward pass is the gradient of the stated loss, and touches nothing else."""

import pytest
import torch

from lolcats.evaluation.perplexity import batches_of, dataset_perplexity
from lolcats.modeling.attention import AttentionCall, Observed
from lolcats.training.stage import weights_of


def record_layers(stage, batch):
    """Inputs and softmax outputs of every linearized layer."""
    seen = {}

    def observe(layer):
        seen[layer.layer_idx] = Observed(*(x.clone() if isinstance(x, torch.Tensor) else x for x in layer))

    call = AttentionCall(mode="softmax", observe=observe)
    with torch.no_grad():
        stage.model.get_decoder()(input_ids=batch["input_ids"], use_cache=False, attention_call=call)
    return seen


def global_loss(seen):
    """The paper's loss over all layers in one graph: mean of the layers' mean squared errors, x 1000."""
    total = 0.0
    for module, _, q, k, v, y_softmax, scoring, visible in seen.values():
        y, _ = module(q, k, v, scoring, cu_seqlens=visible.cu_seqlens)
        total = total + 1000.0 * (y - y_softmax).square().mean()
    return total / len(seen)


def test_local_backward_is_the_gradient_of_the_joint_loss(transfer_stage, gradients):
    stage, train = transfer_stage()
    batch = train.batch(range(2))
    reported = stage.micro_step(batch, 1.0)
    local = gradients(stage)
    for name in local:
        assert local[name].abs().max() > 0, name
    with_gradient = {name for name, p in stage.model.named_parameters() if p.grad is not None}
    assert all("linear_attention" in name for name in with_gradient)
    stage.model.zero_grad()
    loss = global_loss(record_layers(stage, batch))
    loss.backward()
    joint = gradients(stage)
    torch.testing.assert_close(reported["loss"], loss.detach())
    stage.model.zero_grad()
    for index in range(2):
        stage.micro_step(train.batch([index]), 0.5)
    accumulated = gradients(stage)
    for name in local:
        torch.testing.assert_close(local[name], joint[name], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(accumulated[name], local[name], rtol=1e-4, atol=1e-7)


def test_blocks_split_the_layers_and_scale_their_losses(transfer_stage, gradients):
    joint, train = transfer_stage()
    split, _ = transfer_stage(block_layers=1)
    assert [len(block) for block in joint.blocks()] == [6]
    assert [len(block) for block in split.blocks()] == [3, 3]
    batch = train.batch(range(2))
    joint.micro_step(batch, 1.0)
    split.micro_step(batch, 1.0)
    joint_gradients, split_gradients = gradients(joint), gradients(split)
    for name in joint_gradients:  # the mean over one layer instead of two
        torch.testing.assert_close(split_gradients[name], 2 * joint_gradients[name], rtol=1e-4, atol=1e-7)
    result = split.evaluate()
    assert len(result["block_metrics"]) == 2
    assert result["loss"] == pytest.approx(sum(result["block_metrics"]) / 2)


def test_weights_cross_entropy_is_lowest_for_equal_weights(transfer_stage):
    """With a window over everything the student's weights are the teacher's: the loss is their entropy."""
    equal, train = transfer_stage({"window_size": 64}, mse_factor=0.0, xent_factor=1.0)
    short, _ = transfer_stage({"window_size": 4}, mse_factor=0.0, xent_factor=1.0)
    batch = train.batch(range(2))
    _, _, q, k, *_ = record_layers(equal, batch)[0]
    score = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) / q.shape[-1] ** 0.5
    causal = torch.ones(score.shape[-2:], dtype=torch.bool).tril()
    weights = score.masked_fill(~causal, -torch.inf).softmax(-1)
    entropy = -(weights * weights.clamp_min(1e-12).log()).sum(-1).mean()
    losses = equal.micro_step(batch, 1.0)["layer_losses"]
    torch.testing.assert_close(losses[0], entropy, rtol=1e-4, atol=1e-5)
    assert short.micro_step(batch, 1.0)["layer_losses"][0] > entropy + 1e-3


def test_selection_by_perplexity_measures_the_linearized_model(transfer_stage):
    stage, _ = transfer_stage(select_by="perplexity")
    assert stage.metric == "perplexity"
    before = stage.evaluate()
    expected = dataset_perplexity(stage.model, stage.validation)["perplexity"]
    assert before["perplexity"] == pytest.approx(expected)
    for module in stage.layers.values():
        torch.nn.init.normal_(module.q_weight)
    assert stage.evaluate()["perplexity"] != before["perplexity"]
    assert "perplexity" not in transfer_stage()[0].evaluate()


def test_nothing_runs_after_the_last_linearized_layer(transfer_stage):
    for keep, expected in (([], [0, 1]), ([1], [0])):
        stage, train = transfer_stage({"exact": keep})
        ran = []
        for index, layer in enumerate(stage.model.get_decoder().layers):
            layer.mlp.register_forward_hook(lambda *_, ran=ran, index=index: ran.append(index))
        assert list(stage.micro_step(train.batch(range(2)), 1.0)["layer_losses"]) == expected
        assert ran == expected
        stage.model(train.batch([0])["input_ids"])  # the model itself has all its layers
        assert ran == [*expected, 0, 1]


@pytest.mark.gpu
def test_graphs_equal_plain_micro_steps_and_evaluations(transfer_stage, gradients):
    """Also after parameters have changed, those that layers keep something of included."""
    said = []
    stage, train = transfer_stage(device="cuda", select_by="perplexity", report=said.append)
    plain, _ = transfer_stage(device="cuda", select_by="perplexity", cuda_graphs="off")
    perplexities = set()
    for _ in range(6):
        for rows in ([0, 3], [1, 2]):
            results = [each.micro_step(train.batch(rows), 0.5) for each in (stage, plain)]
        torch.testing.assert_close(results[0]["loss"], results[1]["loss"])
        assert list(results[0]["layer_losses"]) == list(results[1]["layer_losses"])
        # adds are in another order
        torch.testing.assert_close(gradients(stage), gradients(plain), rtol=1e-3, atol=1e-5)
        found, expected = (each.evaluate() for each in (stage, plain))
        perplexities.add(expected["perplexity"])
        for name in ("loss", "perplexity"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6)  # the same kernels
        for each in (stage, plain):
            each.model.zero_grad()
            for weight in weights_of(each).values():
                weight.mul_(1.1)
    assert len(perplexities) == 6
    assert said == []
    sizes = set(map(len, batches_of(stage.validation, stage.config.micro_batch_size)))  # each has an evaluation's two
    assert len(stage.graphs._captured) == 1 + 2 * len(sizes)

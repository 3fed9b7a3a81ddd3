"""The factors of the feature maps' start, against trying each of them on a model of its own."""

from __future__ import annotations

import pytest
import torch

from lolcats.parallel.group import Group
from lolcats.training.feature_fit import FACTORS, SEQUENCES, fit_features


def errors_by_head(model, data):
    """layer -> [H] squared error over the first sequences."""
    errors = {}

    def observe(module, layer_idx, q, k, v, y_softmax, call):
        y, _ = module(q, k, v, scale=call["scale"])
        errors[layer_idx] = ((y - y_softmax) ** 2).sum((0, 2, 3))

    inputs = data.batch(range(min(SEQUENCES, len(data))))["input_ids"]
    with model.attention_mode("softmax"), model.observe(observe), torch.no_grad():
        model.get_decoder()(input_ids=inputs, use_cache=False)
    return errors


@pytest.mark.parametrize("share_state", ["kv_head", "query_head"])
@pytest.mark.parametrize("feature_scale", [1.0, 0.3])
def test_every_state_gets_the_factor_with_the_smallest_error(linearized, share_state, feature_scale):
    options = {"share_state": share_state, "feature_map": "hedgehog_bias", "keep_softmax": [0]}
    model, data, _ = linearized(feature_init="fitted", feature_scale=feature_scale, **options)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    best = fit_features(model, data, batch_size=3)
    tried = [linearized(feature_scale=factor * feature_scale, **options)[0] for factor in FACTORS]
    errors = torch.stack([errors_by_head(each, data)[1] for each in tried])
    if share_state == "kv_head":
        errors = errors.unflatten(1, (2, 2)).sum(2)  # two query heads to each state
    assert best == {1: [FACTORS[int(place)] for place in errors.argmin(0)]}
    if feature_scale != 1.0:
        assert all(factor > 1.0 for factor in best[1])  # a scale that is too small is found out

    ((_, module),) = model.linear_layers()
    factor_S = torch.tensor(best[1])
    identity = torch.eye(8, module.k_weight.shape[2]) * feature_scale
    torch.testing.assert_close(module.k_weight, factor_S[:, None, None] * identity)
    factor_H = factor_S.repeat_interleave(4 // len(factor_S))
    torch.testing.assert_close(module.q_weight, factor_H[:, None, None] * identity)
    for name, parameter in model.named_parameters():
        if not name.endswith(("q_weight", "k_weight")):
            assert torch.equal(parameter, before[name])


def test_batches_do_not_matter_and_the_first_process_decides(linearized, monkeypatch):
    alone, data, _ = linearized(feature_init="fitted")
    best = fit_features(alone, data, batch_size=1)
    assert fit_features(linearized(feature_init="fitted")[0], data, batch_size=8) == best
    model, *_ = linearized(feature_init="fitted")
    group = Group()
    monkeypatch.setattr(group, "broadcast", lambda mine: {index: [2.0, 4.0] for index in mine})
    assert fit_features(model, data, batch_size=8, group=group) == {0: [2.0, 4.0], 1: [2.0, 4.0]}
    module = dict(model.linear_layers())[0]
    assert module.k_weight[:, 0, 0].tolist() == [2.0, 4.0]
    assert module.q_weight[:, 0, 0].tolist() == [2.0, 2.0, 4.0, 4.0]

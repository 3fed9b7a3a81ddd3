"""What layers show on several families, against plain runs of the same weights and loops over single tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lolcats.analysis.diagnostics import (
    AttentionMaps,
    bin_numbers,
    doubling_bins,
)
from lolcats.analysis.observe import measure
from lolcats.analysis.stages import StageWeights
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.data import PackedDataset
from lolcats.modeling.call import AttentionCall

COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "phi3": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    "gpt_neox": {},
}


class Collect:
    """Keeps everything that is shown."""

    def __init__(self):
        self.seen = {}

    def see(self, seen):
        _ = seen.y_hybrid_BHTD  # while the stage's weights are in place
        self.seen[seen.layer, seen.stage] = seen


def stage_weights(family):
    """A model with two stages: other feature maps, and in the second also other projections."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON, **FAMILIES[family])).eval()
    model = convert(base, AttentionConfig(window_size=4)).eval()
    first, second = {}, {}
    for name, parameter in model.named_parameters():
        inside = ".linear_attention." in name
        if inside or (name.endswith(".weight") and any(part in name for part in ("self_attn", "attention."))):
            first[name] = parameter.data
            second[name] = parameter.data + 0.3 * torch.randn_like(parameter)
    return StageWeights(model, ["swapped", "adjust"], {"swapped": first, "adjust": second})


@pytest.fixture
def dataset():
    tokens = np.random.default_rng(0).integers(1, 50, (2, 24)).astype(np.int32)
    return PackedDataset(tokens, np.ones_like(tokens, dtype=bool))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_stage_is_seen_with_its_own_weights(family, dataset):
    weights, collect = stage_weights(family), Collect()
    measure(weights, dataset, collect.see, batch_size=2)
    assert set(collect.seen) == {(layer, stage) for layer in (0, 1) for stage in ("swapped", "adjust")}
    tokens = dataset.batch([0, 1])["input_ids"]
    for stage in weights.names:
        weights.use(stage)
        plain = {}
        observe = partial(lambda found, **kw: found.setdefault(kw["layer_idx"], kw), plain)
        with torch.no_grad():
            weights.model(tokens, use_cache=False, attention_call=AttentionCall(mode="softmax", observe=observe))
        # Layer 0 reads the embeddings under all weights; layer 1 reads the first stage's hidden states.
        for layer in (0, 1) if stage == "swapped" else (0,):
            seen = collect.seen[layer, stage]
            torch.testing.assert_close(seen.q_BHTD, plain[layer]["q"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(seen.y_softmax_BHTD, plain[layer]["y_softmax"], rtol=1e-5, atol=1e-5)
        call = {key: value for key, value in plain[0]["call"].items() if key != "sliding_window"}
        module = plain[0]["module"]
        with torch.no_grad():
            y, _ = module(plain[0]["q"], plain[0]["k"], plain[0]["v"], **call, backend="reference")
        torch.testing.assert_close(collect.seen[0, stage].y_hybrid_BHTD, y, rtol=1e-4, atol=1e-5)
    original = collect.seen[1, "swapped"].y_softmax_BHTD
    assert collect.seen[1, "adjust"].y_original_BHTD is original
    assert not torch.allclose(collect.seen[1, "adjust"].y_softmax_BHTD, original, atol=1e-3)


def test_the_last_stage_is_left_even_after_an_error(dataset):
    weights = stage_weights("llama")

    def fail(seen):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        measure(weights, dataset, fail)
    for name, tensor in weights.tensors["adjust"].items():
        assert weights.model.get_parameter(name).data_ptr() == tensor.data_ptr()
    assert all(not module._forward_hooks for module in weights.model.attention_modules().values())


def test_maps_show_the_ends_of_a_long_sequence(dataset):
    weights, maps = stage_weights("llama"), AttentionMaps([1], [0, 3, 9], span=8)
    measure(weights, dataset, maps.see)
    result = maps.result()
    assert result["keys"] == [*range(8), *range(16, 24)]
    assert result["queries"] == [16, 23]
    assert [(entry["layer"], entry["head"]) for entry in result["maps"]] == [(1, 0), (1, 3)]
    softmax = torch.tensor(result["maps"][0]["softmax"])
    assert softmax.shape == (8, 16)
    assert softmax[0, 9:].abs().sum() == 0  # keys after the query
    assert (softmax.sum(1) < 1).all()  # the keys between are not shown
    collect = Collect()
    measure(weights, PackedDataset(dataset.input_ids[:1], dataset.label_mask[:1]), collect.see)
    seen = collect.seen[1, "swapped"]
    score = (seen.q_BHTD[0, 0] @ seen.k_BGTD[0, 0].T) / seen.q_BHTD.shape[-1] ** 0.5
    future = torch.ones_like(score, dtype=torch.bool).triu(1)
    expected = score.masked_fill(future, -torch.inf).softmax(-1)[16:, result["keys"]]
    torch.testing.assert_close(softmax, expected, rtol=1e-3, atol=1e-6)  # four digits are kept


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bins_are_exact_at_powers_of_two(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tokens = 2**17
    number_T = bin_numbers(torch.arange(tokens, device=device)).cpu()
    found = [[int(x[0]), int(x[-1])] for x in torch.arange(tokens).split(number_T.bincount().tolist())]
    assert number_T.equal(number_T.sort().values)
    assert found == doubling_bins(tokens)

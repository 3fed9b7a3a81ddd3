"""Scores of KV heads without gradients, and the heads that they choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lolcats.config import AttentionConfig
from lolcats.conversion import convert
from lolcats.data.retrieval import Sample
from lolcats.modeling.softmax import softmax_attention
from lolcats.ops import HybridParams, hybrid_attention
from lolcats.training.head_scores import by_score, head_scores, scoring_call

TEXT, COPIED, SHOWN, COUNT = 40, 10, 2, 8
T = TEXT + COUNT


@pytest.fixture
def sample():
    """A text without repetitions, and some of its tokens once more."""
    text = torch.randperm(64)[:TEXT].int().numpy()
    answer, source = np.full((2, T), -1, np.int32)
    answer[TEXT + SHOWN :] = source[COPIED + SHOWN : COPIED + COUNT] = np.arange(COUNT - SHOWN)
    return Sample(np.concatenate([text, text[COPIED : COPIED + COUNT]]), answer, source)


@pytest.fixture
def copying_model():
    """KV head 1 of layer 1 attends to equal tokens, the others to all tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e9}  # so that some dimensions of a head do not turn
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope)).eval()
    model.model.embed_tokens.weight.data[:, :4] = torch.nn.functional.normalize(torch.randn(64, 4), dim=1)
    attention = model.model.layers[1].self_attn
    for projection, its_heads in ((attention.q_proj, (2, 3)), (attention.k_proj, (1,))):
        for head in its_heads:
            projection.weight.data[[8 * head + row for row in (2, 3, 6, 7)], :4] += 5.0 * torch.eye(4)
    return convert(model, AttentionConfig(window_size=4))


def copy_scores(model, sample):
    found = {}
    ids = torch.from_numpy(sample.token_ids).long()[None]
    with torch.no_grad():
        model.get_decoder()(input_ids=ids, use_cache=False, attention_call=scoring_call(sample, found))
    return torch.stack([found[layer][0] for layer in (0, 1)])


def test_the_head_that_copies_is_found(copying_model, sample):
    scores = copy_scores(copying_model, sample)
    rows = COUNT - SHOWN + 1  # the answer's tokens, and the one before, which sees no source
    assert scores[1, 1] == pytest.approx((rows - 1) / rows / 2, rel=0.1)  # the other half is for the token itself
    scores[1, 1] = 0
    assert scores.max() < 0.1


def test_only_from_an_answer_to_its_source(copying_model, sample):
    """Neither other rows nor other answers' sources count."""
    for wrong in (
        replace(sample, answer=np.roll(sample.answer, -20)),
        replace(sample, source=np.roll(sample.source, -4)),
        replace(sample, source=np.where(sample.source < 0, -1, COUNT - sample.source)),
    ):
        assert copy_scores(copying_model, wrong).max() < 0.1


@pytest.mark.parametrize(
    ("sinks", "settings"),
    [
        (2, {}),
        (2, {"softcap": 2.0, "scale": 1.0}),
        (0, {"sink_logits": torch.tensor([0.0, 1.0, 2.0, 3.0])}),
        (0, {"sliding_window": 24}),
    ],
    ids=["sinks", "softcap", "sink-logits", "sliding-window"],
)
def test_reach_is_what_a_window_alone_changes(sample, sinks, settings):
    q, k, v = torch.randn(1, 4, T, 8), torch.randn(1, 2, T, 8), torch.randn(1, 2, T, 8)
    config = AttentionConfig(window_size=4, sinks=sinks)
    found = head_scores(q[0], k[0], v[0], sample, config, **settings)[1]

    rows = slice(TEXT + SHOWN - 1, None)
    weight_HRT = softmax_attention(q, k, torch.eye(T).expand(1, 2, -1, -1), **settings)[0, :, rows]
    y_HRD = softmax_attention(q, k, v, **settings)[0, :, rows]
    near_HTD = hybrid_attention(
        *(q, k, v, replace(config, feature_map=None)),
        HybridParams(torch.full((4,), 0.5), **{x: settings[x] for x in settings if x != "sliding_window"}),
    )[0][0, :, rows]
    begins = [(t // 4 - 1) * 4 for t in range(T)[rows]]  # of the windows
    far_HR = torch.stack([weight_HRT[:, row, sinks:begin].sum(-1) for row, begin in enumerate(begins)], 1)
    for head in (0, 1):
        own = slice(2 * head, 2 * head + 2)
        change = (y_HRD[own] - near_HTD[own]).norm() / y_HRD.norm()
        torch.testing.assert_close(found[head], far_HR[own].mean() * change)


def test_two_of_three_are_ranked_by_copying():
    values = {
        "copy": {0: [0.9, 0.1], 1: [0.8, 0.2], 2: [0.3, 0.0]},
        "reach": {0: [0.9, 0.8], 1: [0.1, 0.0], 2: [0.2, 0.7]},
    }
    assert by_score(values) == [
        (0, 0),
        (1, 0),
        (0, 1),
        (2, 0),
        (1, 1),
        (2, 1),
    ]  # 0.0 reaches as far, and is chosen already

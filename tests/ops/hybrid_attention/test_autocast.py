"""Autocast does not reach into the operator: its products and sums stay in float32."""

import pytest
import torch

from lolcats.config.attention import AttentionConfig
from lolcats.modeling.layer import HybridAttention


@pytest.mark.parametrize("task", ["attend", "weights_cross_entropy"])
def test_results_do_not_change_under_autocast(task):
    torch.manual_seed(0)
    module = HybridAttention(AttentionConfig("terraced", 4), 4, 2, 8)
    q, k, v = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    plain, _ = module(q, k, v, task=task)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (q @ q.transpose(-1, -2)).dtype == torch.bfloat16  # autocast is on
        under, _ = module(q, k, v, task=task)
    assert torch.equal(plain, under)


def test_decoding_does_not_change_under_autocast():
    torch.manual_seed(0)
    module = HybridAttention(AttentionConfig("terraced", 4), 4, 2, 8)
    q, k, v = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    with torch.no_grad():
        _, state = module(q, k, v, return_state=True)
        plain, _ = module(q[:, :, :1], k[:, :, :1], v[:, :, :1], state=state)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under, _ = module(q[:, :, :1], k[:, :, :1], v[:, :, :1], state=state)
    assert torch.equal(plain, under)

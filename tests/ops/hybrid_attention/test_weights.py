"""Attention-weight matrices: they are what the outputs are made of."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import SHARES, SPECS, Case, assert_near, make_case, random_mask, reference
from hybrid_checks import plain_softmax
from hybrid_loops import in_softmax_part

from lolcats.ops import attention_weights, weights_cross_entropy

SCALE = 0.4


def repeated_v(case: Case) -> torch.Tensor:
    return case.v.repeat_interleave(case.q.shape[1] // case.k.shape[1], 1)


@pytest.mark.parametrize("share_state", SHARES)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not (spec.sparse_cache or spec.is_retention)])
def test_weights_times_values_are_the_outputs(name: str, share_state: str) -> None:
    case = make_case(SPECS[name], 80, repeats=3, share_state=share_state, sink_logits=True)
    hybrid, softmax, lengths = attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE, softcap=2.0)
    y, _ = case.run(reference, scale=SCALE, softcap=2.0)
    assert lengths.tolist() == [80, 80]
    assert_near(hybrid @ repeated_v(case), y, 1e-11, "hybrid")
    assert_near(softmax @ repeated_v(case), plain_softmax(case, scale=SCALE, softcap=2.0), 1e-11, "softmax")
    assert not hybrid.triu(1).any()
    assert not softmax.triu(1).any()


def test_a_sparse_cache_has_no_weights() -> None:
    case = make_case(SPECS["terraced-8-cache-5"], 30)
    with pytest.raises(ValueError, match="depends on the values"):
        attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE)


def test_retention_has_no_weights() -> None:
    case = make_case(SPECS["retention-sum-elu"], 30)
    with pytest.raises(ValueError, match="not those of a mean"):
        attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE)


def test_rows_sum_to_one() -> None:
    case = make_case(SPECS["terraced-4"], 30)
    for weight in attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE)[:2]:
        torch.testing.assert_close(weight.sum(-1), torch.ones(2, 2, 30, dtype=torch.float64))


def test_sliding_window_limits_the_softmax_only() -> None:
    case = make_case(SPECS["terraced-4"], 30)
    hybrid, softmax, _ = attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE, sliding_window=5)
    distance = torch.arange(30)[:, None] - torch.arange(30)
    assert torch.equal(softmax > 0, ((distance >= 0) & (distance < 5)).expand_as(softmax))
    assert torch.equal(hybrid, attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE)[0])


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_masked_rows_are_the_sequences_alone(kind: str) -> None:
    case = make_case(SPECS["terraced-4"], 30, batch=3)
    mask = random_mask(3, 30, kind, seed=4)
    found = attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE, mask=mask)
    assert found[2].tolist() == mask.sum(1).tolist()
    for b, real in enumerate(mask):
        q, k = case.q[b : b + 1, :, real], case.k[b : b + 1, :, real]
        length = int(real.sum())
        expected = attention_weights(q, k, case.spec, case.params, scale=SCALE)
        for weight, alone in zip(found[:2], expected[:2], strict=True):
            assert_near(weight[b : b + 1, :, :length, :length], alone, 1e-12, f"row {b}")


@pytest.mark.parametrize("layout", ["whole", "mask", "documents"])
def test_cross_entropy_is_the_mean_over_real_queries(layout: str) -> None:
    """Summed up query by query; padding and other documents count for nothing."""
    case = make_case(SPECS["terraced-4"], 20, batch=2)
    options = {}
    sequences = [(0, range(20)), (1, range(20))]
    if layout == "mask":
        options["mask"] = torch.arange(20) >= torch.tensor([[0], [13]])
        sequences = [(0, range(20)), (1, range(13, 20))]
    if layout == "documents":
        options["segment_ids"] = torch.tensor([[0] * 6 + [1] * 14, [2] * 12 + [-1] * 8])
        sequences = [(0, range(6)), (0, range(6, 20)), (1, range(12))]
    total, count = 0.0, 0
    for b, tokens in sequences:
        part = case.rows([b]).part(tokens.start, tokens.stop)
        hybrid, softmax, _ = attention_weights(part.q, part.k, case.spec, case.params, scale=SCALE)
        for n in range(len(tokens)):
            p, logarithm = softmax[0, :, n, : n + 1], hybrid[0, :, n, : n + 1].log()
            total -= (p * logarithm).sum().item()
            count += len(p)
    for block in (7, 128):  # some queries at a time, and all together
        found = weights_cross_entropy(case.q, case.k, case.spec, case.params, scale=SCALE, block=block, **options)
        assert found.item() == pytest.approx(total / count, rel=1e-12)


def test_cross_entropy_is_least_where_the_weights_agree() -> None:
    """With a window that holds everything it is the entropy of softmax attention (Gibbs' inequality)."""
    wide = make_case(SPECS["terraced-64"], 40)
    softmax = attention_weights(wide.q, wide.k, wide.spec, wide.params, scale=SCALE)[1]
    entropy = torch.special.entr(softmax).sum(-1).mean().item()
    least = weights_cross_entropy(wide.q, wide.k, wide.spec, wide.params, scale=SCALE).item()
    assert least == pytest.approx(entropy, rel=1e-12)

    narrow = make_case(SPECS["terraced-4"], 40)
    narrow.params.q_weight.requires_grad_()
    loss = weights_cross_entropy(narrow.q, narrow.k, narrow.spec, narrow.params, scale=SCALE)
    assert loss.item() > entropy + 0.01
    loss.backward()
    assert narrow.params.q_weight.grad.any()


def test_hybrid_weights_are_softmax_like_inside_the_window() -> None:
    """Ratios of weights within a window are those of softmax attention; outside they are not."""
    case = make_case(SPECS["terraced-4"], 20, batch=1)
    hybrid, softmax, _ = attention_weights(case.q, case.k, case.spec, case.params, scale=SCALE)
    n = 18
    ratio = (hybrid / softmax)[0, 0, n, : n + 1]
    inside = torch.tensor([in_softmax_part(case.spec, n, j) for j in range(n + 1)])
    torch.testing.assert_close(ratio[inside], ratio[n].expand(int(inside.sum())), rtol=1e-10, atol=0)
    assert ((ratio[~inside] / ratio[n] - 1).abs() > 1e-3).all()

"""Which tokens a sparse cache retains, and with what accuracy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hybrid_cases import Case, make_case

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState, hybrid_attention

SPEC = AttentionConfig("terraced", 4, sparse_cache=3)


def state_after(case: Case, spec: AttentionConfig = SPEC) -> HybridState:
    state = hybrid_attention(case.q, case.k, case.v, spec, case.params, return_state=True)[1]
    assert state is not None
    return state


@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_float32_is_enough_for_keys_far_from_zero(mean):
    case = make_case(SPEC, 40)
    scale = torch.logspace(-1, 1, case.k.shape[-1], dtype=torch.float64)
    case.k = (case.k * scale + mean).float().double()  # the same numbers in both types
    exact = state_after(case)
    found = state_after(case.map(torch.Tensor.float))
    assert torch.equal(found.cache_k.double(), exact.cache_k)
    # float32: an ulp of the mean against the keys' standard deviation
    torch.testing.assert_close(found.key_moment.double(), exact.key_moment, rtol=1e-4, atol=1e-5 * max(mean, 1.0))


def test_the_moment_is_that_of_all_keys_that_left():
    spec = replace(SPEC, sinks=2)
    case = make_case(spec, 41)
    left = case.k[:, :, 2:36]  # window of two blocks: 36 to 40
    centred = left - left.mean(2, keepdim=True)
    expected = torch.cat([centred.mT @ centred, left.mean(2, keepdim=True)], dim=2)
    torch.testing.assert_close(state_after(case, spec).key_moment, expected)


@pytest.mark.parametrize("keys", ["equal", "zero", "few dimensions"])
def test_covariances_without_full_rank(keys):
    case = make_case(SPEC, 40, dtype=torch.float32)
    if keys == "few dimensions":
        case.k[..., 2:] = 0.0
    else:
        case.k = torch.full_like(case.k, 0.0 if keys == "zero" else 2.5)
    y, state = hybrid_attention(case.q, case.k, case.v, SPEC, case.params, return_state=True)
    assert y.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in state.tensors().values())


def test_a_key_unlike_the_others_stays():
    case = make_case(SPEC, 60)
    case.k[:, :, 9] *= 20.0
    cache_k = state_after(case).cache_k
    assert (cache_k == case.k[:, :, 9:10]).all(-1).any(-1).all()


def test_no_gradient_runs_through_the_choice():
    case = make_case(SPEC, 40)
    case.k.requires_grad_()
    assert not state_after(case).key_moment.requires_grad

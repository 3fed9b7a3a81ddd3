"""Padded batches through the operator: each row gets what it gets without its padding, wherever that is."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import SPECS, assert_near, chunked, make_case, random_mask, reference

from lolcats.ops.packing import Packing


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_padding_is_taken_out_and_put_back(kind):
    case, mask = make_case(SPECS["terraced-4"], 30, batch=3, repeats=2), random_mask(3, 30, kind, seed=4)
    packing = Packing.of_mask(mask)
    x = case.q.clone().requires_grad_()
    q, k, v = (packing.pack(tensor) for tensor in (x, case.k, case.v))
    y = packing.unpack(chunked(q, k, v, case.spec, case.params, cu_seqlens=packing.cu_seqlens)[0], 3, 30)
    for b, real in enumerate(mask):
        alone = (tensor[b : b + 1, :, real] for tensor in (case.q, case.k, case.v))
        assert_near(y[b : b + 1, :, real], reference(*alone, case.spec, case.params)[0], 1e-11, f"row {b}")
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    for tensor in (y, gradient):
        assert not tensor.transpose(1, 2)[~mask].any()
    assert Packing.of_mask(torch.ones_like(mask)) is None

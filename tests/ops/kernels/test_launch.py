"""Who looks at operators sees the operator; plain calls launch at once."""

from __future__ import annotations

import torch
from kernel_kit import DEVICE, make_case
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.launch import is_eager

TERRACED = AttentionConfig("terraced", 4)


def test_whoever_looks_at_operators_sees_one():
    """Gradients, transforms and modes go through the operator; a plain call does not."""

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            names.append(str(function))
            return function(*arguments, **(options or {}))

    case = make_case(TERRACED, 20)
    names: list[str] = []
    with torch.no_grad(), Names():
        y = case.run("triton")[0]
    assert "lolcats.hybrid_attention.default" in names
    with torch.no_grad():
        assert torch.equal(case.run("triton")[0], y)
    assert not is_eager([torch.empty(1, device="meta").as_subclass(type("Other", (Tensor,), {}))])
    assert is_eager([case.q, None, torch.nn.Parameter(case.k)])
    assert torch.func.vmap(lambda x: torch.tensor(is_eager([x])))(torch.zeros(2, device=DEVICE)).sum() == 0
    leaf = case.map(lambda x: x.detach().requires_grad_())
    assert leaf.run("triton")[0].grad_fn is not None

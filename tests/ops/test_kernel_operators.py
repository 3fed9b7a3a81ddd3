"""The kernels beside compiled code, which calls they take, and what layers share."""

from dataclasses import replace

import pytest
import torch
from kit import DEVICE, borders, decode, make_case, triton_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lolcats.ops.hybrid_attention.api import supports, supports_softmax_step
from lolcats.ops.hybrid_attention.kernels.forward import States, scan_chunks
from lolcats.ops.hybrid_attention.kernels.operands import Launches, Operands
from lolcats.ops.hybrid_attention.state import initial_state

TERRACED = "terraced 16"


@torch.no_grad()
def test_layers_share_what_follows_from_borders_and_positions():
    case, cu_seqlens = make_case("terraced 4 sinks=2", 20), borders(5, 0, 12)
    shared: dict = {}
    _, state = case.run("triton", cu_seqlens=cu_seqlens, return_state=True)
    given = {"cu_seqlens": cu_seqlens, "state": state, "return_state": True}
    expected, after = case.run("triton", **given)
    kept = []
    for _ in range(2):
        y, found = case.run("triton", shared=shared, **given)
        assert torch.equal(y, expected)
        assert all(map(torch.equal, found, after))
        kept.append([id(x) for x in shared.values()])
    assert kept[0] == kept[1] != []


@pytest.mark.parametrize("layout", [None, pytest.param(borders(4, 16), marks=pytest.mark.slow)], ids=["rows", "packed"])
def test_compiles_and_runs_again_in_the_backward_pass(layout):
    """Between graphs of torch.compile, forward and backward; and under activation checkpointing."""
    case = make_case(TERRACED, 20, heads=1)
    q = case.q.clone().requires_grad_()

    def loss(q: Tensor, layout: Tensor | None) -> Tensor:
        return replace(case, q=q).run("triton", cu_seqlens=layout)[0].square().sum()

    expected = torch.autograd.grad(loss(q, layout), q)[0]
    for run in (torch.compile(loss, backend="aot_eager"), lambda *x: checkpoint(loss, *x, use_reentrant=False)):
        assert torch.equal(torch.autograd.grad(run(q, layout), q)[0], expected)


def test_the_step_compiles():
    """Between two graphs, and the state's tensors are written."""
    case = make_case("terraced 2", 5)
    expected, state = decode(case, triton_step)
    y, found = decode(case, torch.compile(triton_step, backend="aot_eager"))
    assert torch.equal(y, expected)
    assert all(map(torch.equal, found, state))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_scan_leaves_out_the_own_entry(reverse):
    """Features over a clamped denominator are 1e12: a sum less the own entry would lose all before it."""
    case = make_case("sliding 0", 640)
    tensors = (case.q, case.k, case.v, *case.params.tensors, *[None] * 4)
    x = Operands(tensors, case.config, 0.25, None)
    S = torch.randn(1, 1, 10, x.shape.F, x.shape.D, device=DEVICE)
    z = torch.rand(1, 1, 10, x.shape.F, device=DEVICE)
    S[:, :, 4, ::2], z[:, :, 4, ::2] = 1e12, 1e12
    right_S, right_z = (x.double().clone() for x in (S, z))
    right_S, right_z = (x.flip(2).cumsum(2).flip(2) - x if reverse else x.cumsum(2) - x for x in (right_S, right_z))
    scan_chunks(x, States(S, z), None, reverse=reverse)
    torch.testing.assert_close((S.double(), z.double()), (right_S, right_z), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"columns": 200}, "feature_dim is 200"),
        ({"config": "sliding 8 sinks=65"}, "65 sinks"),
    ],
)
def test_says_why_not(change, reason):
    case = make_case(**({"config": TERRACED, "tokens": 1} | change))
    tensors = case.q, case.k, case.v, case.config, case.params
    state = initial_state(case.config, case.params, case.k)
    assert reason in (supports(*tensors) or "")
    assert reason in (supports(*tensors, state=state, step=True) or "")
    with pytest.raises(ValueError, match=reason):
        case.run("triton")
    with torch.no_grad(), pytest.raises(ValueError, match=reason):
        triton_step(case, state=state)
    q, k, v = (torch.zeros(1, 1, keys, width, device=DEVICE) for keys, width in ((1, 64), (9, 64), (9, 32)))
    assert supports_softmax_step(q, k, k) is None
    assert "Keys have 64 and values 32" in (supports_softmax_step(q, k, v) or "")


class Kernel:
    """A kernel, of which `search` gives what is compiled."""

    arg_names = "x", "n", "FIRST", "SECOND"

    def __init__(self, log, compiled=None):
        self.log, self.compiled = log, compiled

    def __getitem__(self, grid):
        return lambda *args, **constants: self.log.append((grid, args, *constants)) or self.compiled


def test_a_known_launch_skips_the_search():
    """Its arguments are in the kernel's order, constants behind, without what is the compiler's alone."""
    searched, launched, launches = [], [], Launches()
    kernels = [Kernel(searched, Kernel(launched)) for _ in range(2)]
    for key, which, grid, first in ((1, 0, 5, 8), (1, 0, 6, 8), (1, 0, 7, 9), (2, 0, 5, 8), (1, 1, 5, 8)):
        launches(key, kernels[which], (grid,), "x", 3, num_warps=4, SECOND=7, FIRST=first)
    assert len(searched) == 4
    assert launched == [((6, 1, 1), ("x", 3, 8, 7))]

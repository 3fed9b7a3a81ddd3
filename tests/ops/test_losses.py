"""The losses of attention transfer and the weights they are about: those of their definitions."""

from functools import partial

import pytest
import torch
from kit import CONFIGS, Case, Row, assert_near, exact, make_case, needs_triton, varied

from lolcats.modeling.softmax import softmax_attention
from lolcats.ops import Scoring, attention_weights, output_mse, weights_cross_entropy
from lolcats.ops.hybrid_attention.state import DENOMINATOR_FLOOR

SCALE = 0.4
TOKENS, BLOCK = 70, 32  # the last block is shorter
LAYOUTS = {
    "whole": {},
    "softcap": {"softcap": 2.0},
    "native window": {"sliding_window": 5},
}
make_double = partial(make_case, dtype=torch.float64)


def weights(case: Case, softcap=None, **options):
    params = case.params._replace(scale=SCALE, softcap=softcap)
    return attention_weights(case.q, case.k, case.config, params, **options)(0, case.tokens)


def definition(q, k, config, params, *, block, **options):
    hybrid, softmax = attention_weights(q, k, config, params, **options)(0, q.shape[2])
    return -(softmax.detach() * hybrid.clamp_min(DENOMINATOR_FLOOR).log()).sum(-1).mean()


def gradients_of(loss, leaves: Case) -> dict[str, torch.Tensor]:
    """`loss`, and the gradients of thrice of it."""
    named = {name: x for name, x in leaves.leaves().items() if isinstance(x, torch.Tensor) and x.requires_grad}
    gradients = torch.autograd.grad(3.0 * loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), gradients, strict=True)
    found = {f"gradient of {name}": torch.zeros_like(x) if g is None else g for (name, x), g in pairs}
    return {"loss": loss.detach()} | found


def check_same_as_definition(case: Case, softcap=None, **options) -> None:
    def evaluate(function, case):
        leaves = case.map(lambda x: x.detach().clone().requires_grad_())
        params = leaves.params._replace(scale=SCALE, softcap=softcap)
        return gradients_of(function(leaves.q, leaves.k, leaves.config, params, block=BLOCK, **options), leaves)

    assert_near(evaluate(weights_cross_entropy, case), evaluate(definition, exact(case)), case.q.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", CONFIGS)
def test_cross_entropy_is_its_definition(config, layout):
    sizes = varied(CONFIGS.index(config)) | {"batch": 2}
    check_same_as_definition(make_case(config, TOKENS, **sizes), **LAYOUTS[layout])


def test_weights_below_the_floor():
    """Of exactly zero, among them all those of a query, and smaller than the floor."""
    zero = make_double("sliding 0 map=t2r", TOKENS, batch=2, columns=2)
    hybrid, softmax = weights(zero)
    assert (softmax[hybrid < DENOMINATOR_FLOOR] > 0).any()
    assert not hybrid.sum(-1).all()
    check_same_as_definition(zero)


def test_cross_entropy_without_autograd_and_what_it_keeps():
    case = make_double("terraced 4", 600)
    arguments = (case.q, case.k, case.config, case.params)
    with torch.no_grad():
        value = weights_cross_entropy(*arguments)
    case.params.k_weight.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda _: None):
        again = weights_cross_entropy(*arguments)
    torch.testing.assert_close(value, again.detach())
    assert 0 < max(saved) <= case.q.numel()  # no matrix of weights


def test_unused_gamma_has_no_gradient():
    """Not one of zeros, with which weight decay would change it."""
    case = make_double("sliding 0", TOKENS).map(lambda tensor: tensor.requires_grad_())
    weights_cross_entropy(case.q.detach(), case.k.detach(), case.config, case.params).backward()
    assert case.params.window_factor.grad is None
    assert case.params.q_weight.grad.any()


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_times_values_are_the_outputs(config):
    case = make_double(config, 60, batch=2, heads=6, kv_heads=2, sink_logits=True)
    hybrid, softmax = weights(case, softcap=2.0)
    v, scores = case.v.repeat_interleave(3, 1), {"scale": SCALE, "softcap": 2.0}
    expected = {"hybrid": case.run("reference", **scores)[0]}
    expected["softmax"] = softmax_attention(case.q, case.k, case.v, Scoring(case.params.sink_logits, **scores))
    assert_near({"hybrid": hybrid @ v, "softmax": softmax @ v}, expected, torch.float64)
    assert not hybrid.triu(1).any()
    assert not softmax.triu(1).any()


def test_a_native_window_limits_the_softmax():
    _, softmax = weights(make_double("terraced 4", 30), sliding_window=5)
    assert torch.equal(softmax[0] > 0, torch.ones_like(softmax[0]).tril().triu(-4) > 0)


# --- the error of the outputs: that of kernels, which never write them, too ------------------------------------------

TRAINED = {"batch": 2, "heads": 9, "kv_heads": 3, "head_dim": 64, "columns": 32, "dtype": torch.bfloat16}
ERRORS = [("chunked", Row("terraced 4", TOKENS, None, {"heads": 4}))]
ERRORS += [
    pytest.param("triton", row, marks=needs_triton)
    for row in (Row("terraced 64", 133), Row("sliding 20 sinks=3", 70), Row("terraced 8 map=None", 70))
]
ERRORS += [
    pytest.param("triton", row, marks=[needs_triton, mark])
    for mark, row in (
        (pytest.mark.slow, Row("sliding 20 sinks=3", 133, None, {"sink_logits": True}, 2.0)),
        *(
            (pytest.mark.gpu, Row(config, 1000, None, TRAINED))
            for config in ("terraced 64", "terraced 128 sinks=1 cap=150", "sliding 20 sinks=3")
        ),
    )
]


@pytest.mark.parametrize(("backend", "row"), ERRORS, ids=str)
def test_output_mse_is_its_definition(backend, row):
    """And so are the gradients of the parameters."""
    case, _, options = row.inputs()
    target = torch.randn(case.q.shape).to(case.q)
    del options["return_state"]

    def parameters(case: Case) -> Case:
        leaves = case.map(lambda x: x.detach().clone().requires_grad_())
        return leaves.with_qkv(torch.Tensor.detach, params=leaves.params._replace(**options))

    right, found = parameters(exact(case)), parameters(case)
    expected = gradients_of((right.run("reference", **options)[0] - target.double()).square().mean(), right)
    arguments = (found.q, found.k, found.v, target, found.config, found.params)
    loss = output_mse(*arguments, backend=backend)
    dtype = torch.bfloat16 if case.q.dtype == torch.bfloat16 else torch.float32
    assert_near(gradients_of(loss, found), expected, dtype)
    with pytest.raises(ValueError, match="target: expected q's shape"):
        output_mse(*arguments[:3], target[:, :1], *arguments[4:], backend=backend)

"""Products of few rows: the same results, and the model and its weights as before."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from lolcats.config import AdjustSection
from lolcats.modeling import products
from lolcats.modeling.fused import generation_kernels
from lolcats.modeling.products import Together, few_row_products, written
from lolcats.ops import few_rows_kernel
from lolcats.training.lora import add_lora

# Triton decides when it is imported whether kernels run on the CPU.
interpreted_kernels = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # float32, the same sums in another order


def logits(model, input_ids):
    with torch.no_grad():
        return model(input_ids, use_cache=False).logits


def attributes(model):
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def in_one_tensor(*parameters):
    return len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1


def counted(monkeypatch, function="linear"):
    """Shapes of the weights of products made from now on."""
    shapes, plain = [], getattr(products, function)
    monkeypatch.setattr(products, function, lambda x, w, b: shapes.append((*w.shape,)) or plain(x, w, b))
    return shapes


@torch.no_grad()
def test_families(small_window, kit):
    """All layers, in pieces with a cache, and for more rows than are computed together."""
    model = copy.deepcopy(small_window)
    input_ids, sizes = kit.tokens(2, 40), [9, 1, 22, 1, 7]
    expected, steps = logits(model, input_ids), kit.in_pieces(model, input_ids, sizes)[0]
    single = kit.in_pieces(model, input_ids[:1, :5], [3, 1, 1])[0]
    with few_row_products(model):
        torch.testing.assert_close(logits(model, input_ids), expected, **TOLERANCE)
        torch.testing.assert_close(kit.in_pieces(model, input_ids, sizes)[0], steps, **TOLERANCE)
        torch.testing.assert_close(kit.in_pieces(model, input_ids[:1, :5], [3, 1, 1])[0], single, **TOLERANCE)


def test_the_model_is_as_before(model, kit, tmp_path):
    input_ids = kit.tokens(2, 9)
    parameters = dict(model.named_parameters())
    values = {name: x.clone() for name, x in model.state_dict().items()}
    expected, before = logits(model, input_ids), attributes(model)
    with few_row_products(model):
        layer = model.get_decoder().layers[1]
        attention, mlp = layer.self_attn, layer.mlp
        assert in_one_tensor(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        assert in_one_tensor(attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias)
        assert in_one_tensor(mlp.gate_proj.weight, mlp.up_proj.weight)
        assert len(attention.q_proj.weight.untyped_storage()) == 4 * 32 * (32 + 16 + 16)  # bytes: and nothing else
        assert not in_one_tensor(attention.q_proj.weight, mlp.up_proj.weight)
    assert attributes(model) == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    state = model.state_dict()
    assert state.keys() == values.keys()
    assert all(torch.equal(state[name], value) for name, value in values.items())
    assert torch.equal(logits(model, input_ids), expected)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, input_ids), expected)
    # a second time nothing moves: graphs of the first may still read the weights
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with few_row_products(model), few_row_products(model):
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        torch.testing.assert_close(logits(model, input_ids), expected, **TOLERANCE)
    assert attributes(model) == before


def test_one_product_for_layers_of_one_input(model, kit, monkeypatch):
    layers = model.config.num_hidden_layers
    attention, together, alone = (64, 32), (96, 32), (48, 32)
    with few_row_products(model):
        shapes = counted(monkeypatch)
        logits(model, kit.tokens(1, 1))
        assert shapes.count(attention) == layers
        assert shapes.count(together) == layers + 1  # and the head, which is of this shape
        assert alone not in shapes
        shapes.clear()
        logits(model, kit.tokens(1, 9))
        assert shapes.count(attention) == layers
        assert shapes.count(together) == layers + 1
        assert alone not in shapes
        shapes.clear()
        logits(model, kit.tokens(1, 65))
        assert shapes.count(attention) == layers
        assert shapes.count(alone) == 2 * layers
        shapes.clear()
        logits(model, kit.tokens(6, 100))
        assert attention not in shapes
        assert shapes.count((16, 32)) == 2 * layers


@pytest.fixture
def three():
    """Three linear layers of one module, of which the first is the longest."""
    module = nn.Module()
    module.q_proj, module.k_proj, module.v_proj = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(8, 4)
    return module


def group_of(module, names=("q_proj", "k_proj", "v_proj")):
    layers = [getattr(module, name) for name in names]
    return products._Group(layers, Together(names, 4)), layers


@torch.no_grad()
def test_other_inputs_and_other_orders(three, monkeypatch):
    group, layers = group_of(three)
    x, other = torch.randn(2, 8), torch.randn(2, 8)

    def check(*calls):
        for index, given in calls:
            torch.testing.assert_close(group.forward(index, given), layers[index](given))

    check((0, x), (1, x), (2, x))
    assert group.kept[1] == {}
    check((0, x), (1, other), (2, x))
    check((2, x), (1, x), (0, x))
    check((0, x), (1, x), (1, x), (2, x.clone()))
    many = torch.randn(5, 8)
    check((0, x), (0, many), (1, x), (1, many))
    with torch.enable_grad():
        check((0, x), (1, x))
        assert group.forward(1, x).requires_grad
    # the wrong variant: an input of the same shape and type is taken for the same
    group.forward(0, x)
    monkeypatch.setattr(group, "kept", (lambda: other, group.kept[1]))
    assert (group.forward(1, other) - layers[1](other)).abs().max() > 1e-2


@torch.no_grad()
def test_results_live_no_longer_than_their_input(three):
    group, _ = group_of(three)
    x = torch.randn(2, 8)
    result = weakref.ref(group.forward(0, x))
    assert set(group.kept[1]) == {1, 2}
    del x
    gc.collect()
    assert group.kept[1] == {}
    assert result() is None


class MLP(nn.Module):
    """As in transformers' families."""

    def __init__(self, activation, bias):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6, bias=bias), nn.Linear(8, 6, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(6, 8, bias=bias), activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ScaledMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).mul(2) * self.up_proj(x))


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (3, 8), (2, 2, 8), (1, 5, 8)])
@pytest.mark.parametrize("activation", [nn.SiLU(), ACT2FN["gelu_pytorch_tanh"]], ids=str)
@pytest.mark.parametrize("interpreted", ["0", pytest.param("1", marks=interpreted_kernels)])
def test_gated_mlp(activation, shape, bias, interpreted, monkeypatch):
    """One product and one launch, of at most four rows here; others, and what is not known, as before."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    mlp, x = MLP(activation, bias), 3 * torch.randn(shape)
    assert products._is_gated(mlp)
    group, _ = group_of(mlp, ("gate_proj", "up_proj"))
    called = []
    y = products._gated_mlp(mlp, group, lambda x: called.append(1) or mlp(x), x)
    assert bool(called) == (x.numel() > 4 * 8)
    torch.testing.assert_close(y, mlp(x))
    model = SimpleNamespace(get_decoder=lambda: nn.ModuleList([mlp, ScaledMLP(activation, bias)]))
    with products.gated_mlps(model):
        assert ["forward" in vars(x) for x in model.get_decoder()] == [True, False]
        torch.testing.assert_close(mlp(x), y)
        with torch.enable_grad():
            assert mlp(x.requires_grad_()).requires_grad
    assert "forward" not in vars(mlp)
    assert not products._is_gated(ScaledMLP(activation, bias))
    assert not products._is_gated(MLP(nn.ReLU(), bias))


@torch.no_grad()
def test_weights_that_moved(three):
    """Others than those that were joined: each layer computes with its own."""
    group, layers = group_of(three)
    x = torch.randn(2, 8)
    three.to(torch.float64)
    for index, layer in enumerate(layers):
        torch.testing.assert_close(group.forward(index, x.double()), layer(x.double()))
    group, layers = group_of(three.float())
    three.k_proj.weight = nn.Parameter(torch.randn(4, 8))
    for index, layer in enumerate(layers):
        torch.testing.assert_close(group.forward(index, x), layer(x))


def test_what_stays_as_it_is(model):
    first, second = (layer.self_attn for layer in model.get_decoder().layers)
    first.k_proj.weight = second.k_proj.weight  # shared
    second.v_proj.bias = None
    model.get_decoder().layers[0].mlp.up_proj.forward = lambda x: x  # someone else's
    model.get_decoder().layers[1].mlp.up_proj.double()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    before = attributes(model)
    with few_row_products(model):
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert attributes(model) == before


@torch.no_grad()
def test_with_adapters(model, kit):
    wrapped = add_lora(model, AdjustSection(lora_rank=2)).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    input_ids = kit.tokens(2, 9)
    expected = logits(model, input_ids)
    with few_row_products(model):
        torch.testing.assert_close(logits(model, input_ids), expected, **TOLERANCE)


@interpreted_kernels
@torch.no_grad()
def test_one_row_in_half_precision(model, kit, monkeypatch):
    """Every linear layer and the head run in the kernel, here through Triton's interpreter."""
    model.half()
    input_ids = kit.tokens(1, 1)
    expected = logits(model, input_ids)
    with few_row_products(model):
        shapes = counted(monkeypatch)
        found = logits(model, input_ids)
        assert shapes == []
        logits(model, kit.tokens(1, 2))
        assert shapes
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # float16, two layers


@interpreted_kernels
@torch.no_grad()
def test_a_few_rows_in_half_precision(model, kit, monkeypatch):
    """Those that the kernel takes, with the MLP's activation inside, here through Triton's interpreter."""
    taken = []

    def takes_product(rows, weight, gated=False):
        taken.append((*weight.shape, gated))
        return weight.shape[1] % 32 == 0

    monkeypatch.setattr(few_rows_kernel, "takes_product", takes_product)
    monkeypatch.setattr(few_rows_kernel, "tiles", lambda *given: few_rows_kernel.Tiles(32, 32, 2))
    model.half()
    input_ids, layers = kit.tokens(1, 3), len(model.get_decoder().layers)
    expected = logits(model, input_ids)
    with few_row_products(model):
        found = logits(model, input_ids)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # float16, two layers
    assert taken.count((64, 32, False)) == taken.count((96, 32, True)) == layers


def test_training_in_the_block(model, kit):
    """Gradients are the layers' own."""

    def gradients():
        model.zero_grad()
        model(kit.tokens(1, 1), labels=kit.tokens(1, 1)).logits.square().mean().backward()
        return [x.grad for x in model.parameters() if x.grad is not None]

    expected = gradients()
    with few_row_products(model):
        assert all(map(torch.equal, gradients(), expected))


def test_generation_kernels_restore_the_model(model, kit):
    input_ids = kit.tokens(2, 9)
    expected, before = logits(model, input_ids), attributes(model)
    with generation_kernels(model):
        assert torch.equal(logits(model, input_ids), expected)
    assert attributes(model) == before


def test_forward_functions_are_those_of_the_models_source_file():
    """transformers 5.24 wraps them: what is compared or copied would be the wrapper."""
    from transformers.models.llama import modeling_llama

    for kind in (modeling_llama.LlamaAttention, modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaMLP):
        assert written(kind.forward).__globals__ is vars(modeling_llama)

"""Decode steps with compiled layers: the same results from few compilations, and plain modules where it does not work.

The compiler is PyTorch's, whose graphs run as they are but in the slow test: Inductor needs a minute on a CPU.
"""

from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.functional import linear, silu

from lolcats.generation.runner import Runner
from lolcats.modeling import fused
from lolcats.modeling.graphs import Graphs


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were compiled, one after another."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(fused, "_compile_graph", backend)
    yield made
    torch.compiler.reset()


class EagerGraphs(Graphs):
    """Runs its calls as they are, and before the first those without effects."""

    def _capture(self, key, call, warm_up):
        warm_up()
        self.captured[key] = SimpleNamespace(replay=lambda: None), None

    def run(self, key, call, warm_up):
        super().run(key, call, warm_up)
        return call()


def runner_with_compiled_layers(model):
    """Decodes as with CUDA graphs."""
    runner = Runner(model, 5, 64)
    runner.compiled.works = True
    runner.graphs = EagerGraphs(runner.compiled.give_up)
    return runner


def steps(runner, rows=(3, 5, 1, 4)):
    """Logits of steps with so many rows each."""
    runner.prefill([0, 1, 2, 3, 4], [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3], [2, 2]])
    return [runner.decode([*range(count)]) for count in rows]


def test_compiled_steps_give_the_same(any_model, graphs):
    runner, plain = runner_with_compiled_layers(any_model), Runner(any_model, 5, 64)
    torch.testing.assert_close(steps(runner), steps(plain))
    assert graphs
    for slot in range(5):
        torch.testing.assert_close(runner.cache.read(slot), plain.cache.read(slot))


def test_all_layers_share_what_is_compiled(kit, graphs):
    """Of layers and the head, each for the first number of rows, for any number, and for one."""
    steps(runner_with_compiled_layers(kit.make_model(num_hidden_layers=6)))
    assert len(graphs) == 2 * 3


@pytest.fixture
def calls(monkeypatch):
    """How `few_rows`, here in plain PyTorch, is called in the place of linear layers of any size."""
    made = []

    def few_rows(x, weights, gated, residual):
        made.append((len(weights), gated, residual is not None))
        ys = [linear(x, weight) for weight in weights]
        ys = [silu(ys[0]) * ys[1]] if gated else ys
        return ys if residual is None else [residual + ys[0]]

    module = pytest.importorskip("lolcats.ops.few_rows")
    monkeypatch.setattr(module, "few_rows", SimpleNamespace(_opoverload=few_rows))
    monkeypatch.setattr(module, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(fused, "_compile_graph", lambda graph, x: (module.use_few_rows(graph), graph.forward)[1])
    torch.compiler.reset()
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize("bias", [False, True])
def test_large_layers_run_together(kit, calls, bias):
    """In the place of q, k, v; of o and of down with what is added to them; of gate and up; of the head."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    model = kit.make_model(num_hidden_layers=1, attention_bias=bias, dtype=torch.bfloat16, **sizes)
    expected = steps(Runner(model, 5, 64))
    torch.testing.assert_close(steps(runner_with_compiled_layers(model)), expected)
    assert {*calls} == {(3, False, False), (1, False, not bias), (2, True, False), (1, False, True), (1, False, False)}


def zeroed_later(x, w, u):
    y = linear(x, w)
    y[..., :3].zero_()
    return y + linear(x, u)


def zeroed_between(x, w, u):
    y = linear(x, w)
    x[..., :3].zero_()
    return y + linear(x, u)


def added_to_more(x, w, u):
    return x.float()[..., :64] + linear(x, w), linear(x, w, bias=u[:, 0]), linear(x, 2 * u)


@pytest.mark.parametrize("function", [zeroed_later, zeroed_between, added_to_more])
def test_other_graphs_stay_the_same(calls, function):
    """Changes in place that nobody reads; sums in another type; weights that are computed, named arguments."""
    x, w, u = (torch.randn(rows, 64, dtype=torch.bfloat16) for rows in (3, 64, 64))
    compiled = torch.compile(function, backend=fused._compile_graph)
    torch.testing.assert_close(compiled(x.clone(), w, u), function(x.clone(), w, u))


def test_a_failing_compiler_is_reported_and_layers_run_plain(kit, monkeypatch, recwarn):
    def failing(graph, inputs):
        if len(graph.graph.nodes) < 6:  # the head's: all layers have run
            raise OSError("no C compiler")
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(fused, "_compile_graph", failing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = kit.make_model()
    runner = runner_with_compiled_layers(model)
    torch.testing.assert_close(steps(runner), steps(Runner(model, 5, 64)))
    assert runner.graphs.works
    assert not runner.compiled.works
    assert [str(x.message) for x in recwarn if "not compiled" in str(x.message)] == [
        "decoding with layers that are not compiled, slower: BackendCompilerFailed: backend='failing' raised:"
    ]


def quantise(layer):
    layer.mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.int8), requires_grad=False)


CHANGES = {
    "hook": lambda layer: layer.mlp.register_forward_hook(lambda *given: None),
    "device map": lambda layer: setattr(layer.mlp, "_hf_hook", object()),
    "other forward": lambda layer: setattr(layer.mlp, "forward", lambda x: x),
    "quantised weight": quantise,
    "other class": lambda layer: setattr(layer.mlp, "up_proj", type("Linear4bit", (nn.Linear,), {})(32, 48)),
    "adapter": lambda layer: inject_adapter_in_model(LoraConfig(r=2, target_modules=["up_proj"]), layer.mlp),
}


def compiled_modules(model):
    layers = fused.CompiledLayers(model, enabled=True)
    with layers.active():
        return [name for name, part in model.named_modules() if isinstance(vars(part).get("forward"), partial)]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_not_plain_are_left_alone(own_model, change):
    assert compiled_modules(own_model) == ["model.model.layers.0", "model.model.layers.1"]
    CHANGES[change](own_model.get_decoder().layers[0])
    before = {(name, key): x for name, part in own_model.named_modules() for key, x in vars(part).items()}
    assert compiled_modules(own_model) == ["model.model.layers.1"]
    assert {(name, key): x for name, part in own_model.named_modules() for key, x in vars(part).items()} == before


def test_ligers_functions_are_set_aside(own_model, monkeypatch):
    norm = own_model.get_decoder().layers[0].input_layernorm

    def forward(self, x):
        raise AssertionError("liger-kernel's")

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    norm.forward = own = forward.__get__(norm)
    layers = fused.CompiledLayers(own_model, enabled=True)
    with suppress(ZeroDivisionError), layers.active():
        assert "forward" not in vars(norm)
        raise ZeroDivisionError
    assert vars(norm)["forward"] is own
    assert compiled_modules(own_model) == ["model.model.layers.0", "model.model.layers.1"]


@pytest.mark.slow
def test_with_inductor(kit, monkeypatch):
    monkeypatch.setattr(fused, "OPTIONS", {})
    monkeypatch.setattr(fused, "SMALL", {})
    torch.compiler.reset()
    model = kit.make_model(dtype=torch.float32)
    torch.testing.assert_close(
        steps(runner_with_compiled_layers(model)), steps(Runner(model, 5, 64)), rtol=1e-4, atol=1e-4
    )  # float32 in another order

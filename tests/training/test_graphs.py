"""Micro-steps through fixed tensors: what a CUDA graph does, played on the CPU; the real thing on a GPU."""

from functools import partial

import pytest
import torch
from torch import nn

from lolcats.training.graphs import WARM_UP, Graphs, _Graph, graphs_wanted

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", ON_GPU])


class Played(Graphs):
    """A "graph" that calls the function again on the captured tensors, and writes into the captured results."""

    def _warm_up(self, call, inputs):
        return call(inputs)

    def _capture(self, call, inputs):
        fixed = {name: tensor.clone() for name, tensor in inputs.items()}
        results, gradients = self._played(call, fixed)

        def replay():
            again, new = self._played(call, fixed)
            for name, tensor in again.items():
                results[name].copy_(tensor)
            for parameter, tensor in new.items():
                gradients[parameter].copy_(tensor)

        return _Graph(replay, fixed, results, gradients)

    def _played(self, call, fixed):
        before = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        results, gradients = call(fixed), {p: p.grad for p in self.parameters if p.grad is not None}
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        return results, gradients


def make(device, enabled=True):
    """A step, the weight that it trains, a parameter that it does not use, and its graphs."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, device=device))
    unused = nn.Parameter(torch.randn(3, device=device))

    def compute(inputs, scale):
        loss = (inputs["x"] @ weight).square().mean()
        (loss * scale).backward()
        return {"loss": loss.detach()}

    graphs = (Played if device == "cpu" else Graphs)([weight, unused], enabled=enabled)
    return partial(graphs, compute), weight, unused, graphs


def trained(step, weight, sizes=(5,)):
    """Losses and the weight after some updates with accumulated gradients."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([weight], lr=0.05)
    losses = []
    for update in range(10):
        for _ in range(2):
            inputs = {"x": torch.randn(sizes[update % len(sizes)], 4, generator=generator).to(weight.device)}
            losses.append(step(inputs, scale=0.5)["loss"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses), weight.detach()


@DEVICES
@pytest.mark.parametrize("sizes", [(5,), (5, 3)])
def test_replaying_equals_calling(device, sizes):
    graphed, weight, unused, graphs = make(device)
    plain, expected_weight, *_ = make(device, enabled=False)
    found, expected = trained(graphed, weight, sizes), trained(plain, expected_weight, sizes)
    assert len(graphs._captured) == len(sizes)
    torch.testing.assert_close(found, expected)  # results are copies: later replays do not change them
    assert unused.grad is None
    graphs.release()
    assert not graphs._captured
    graphed({"x": torch.ones(5, 4, device=device)}, scale=1.0)
    assert weight.grad is not None


def test_another_scale_is_another_graph():
    step, weight, _, graphs = make("cpu")
    for scale in (1.0, 0.5):
        for _ in range(WARM_UP + 2):
            weight.grad = None
            step({"x": torch.ones(5, 4)}, scale=scale)
        assert torch.allclose(weight.grad, scale * 2 * weight.sum().detach() * torch.ones(4))
    assert len(graphs._captured) == 2


@pytest.mark.parametrize("device", [ON_GPU])
def test_what_cannot_be_captured_is_called(device):
    said = []
    weight = nn.Parameter(torch.ones(4, device=device))

    def compute(inputs):
        loss = (inputs["x"] @ weight).mean()
        if loss.item() > -1e9:  # waits for the GPU
            loss.backward()
        return {"loss": loss.detach()}

    graphs = Graphs([weight], enabled=True, report=said.append)
    stream = torch.cuda.current_stream()
    for _ in range(5):
        weight.grad = None
        loss = graphs(compute, {"x": torch.ones(3, 4, device=device)})["loss"]
    assert float(loss) == 4.0
    assert weight.grad.tolist() == [1.0] * 4
    assert len(said) == 1
    assert "without CUDA graphs" in said[0]
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device=device).isfinite().all()  # the generator works again


@DEVICES
def test_obstacles_are_told(device):
    said = []
    model = nn.Linear(2, 2, device=device)
    on_gpu = device == "cuda"
    assert graphs_wanted("auto", model, said.append) == on_gpu
    assert not graphs_wanted("auto", model, said.append, has_dropout=True)
    assert said == ["training without CUDA graphs: there is dropout"] * on_gpu
    assert not graphs_wanted("off", model, said.append)

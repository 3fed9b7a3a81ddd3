"""Micro-steps through fixed tensors: what a CUDA graph does, played on the CPU; the real thing on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lolcats.training.graphs import WARM_UP, GraphedStep, _Graph, graphs_wanted


class PlayedStep(GraphedStep):
    """A "graph" that calls the function again on the captured tensors, and writes into the captured results."""

    fails = False

    def _warm_up(self, inputs, constants):
        return self.compute(inputs, **constants)

    def _capture(self, inputs, constants):
        if self.fails:
            self.enabled = False
            return None
        fixed = {name: tensor.clone() for name, tensor in inputs.items()}
        results, gradients = self._played(fixed, constants)

        def replay():
            again, new = self._played(fixed, constants)
            for name, tensor in again.items():
                results[name].copy_(tensor)
            for parameter, tensor in new.items():
                gradients[parameter].copy_(tensor)

        return _Graph(replay, fixed, results, gradients)

    def _played(self, fixed, constants):
        before = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        results, gradients = self.compute(fixed, **constants), self._gradients()
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        return results, gradients


def make(step_class=PlayedStep, device="cpu", **options):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, device=device))
    unused = nn.Parameter(torch.randn(3, device=device))

    def compute(inputs, scale):
        loss = (inputs["x"] @ weight).square().mean()
        (loss * scale).backward()
        return {"loss": loss.detach()}

    return step_class(compute, [weight, unused], **{"enabled": True, **options}), weight, unused


def trained(step, weight, device="cpu", updates=6, micro_steps=2, sizes=(5,)):
    """Losses, first gradients and the weight after some updates with accumulated gradients."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([weight], lr=0.05)
    losses = []
    for update in range(updates):
        for _ in range(micro_steps):
            size = sizes[update % len(sizes)]
            inputs = {"x": torch.randn(size, 4, generator=generator).to(device)}
            losses.append(step(inputs, scale=1.0 / micro_steps)["loss"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).cpu(), weight.detach().cpu()


@pytest.mark.parametrize("sizes", [(5,), (5, 3)])
def test_replaying_equals_calling(sizes):
    graphed, weight, unused = make()
    plain, expected_weight, _ = make(enabled=False)
    losses, after = trained(graphed, weight, sizes=sizes)
    expected_losses, expected_after = trained(plain, expected_weight, sizes=sizes)
    assert len(graphed._captured) == len(sizes)
    assert torch.equal(losses, expected_losses)  # results are copies: later replays do not change them
    assert torch.equal(after, expected_after)
    assert unused.grad is None


def test_gradients_add_up_to_those_that_are_there():
    step, weight, _ = make()
    inputs = {"x": torch.randn(5, 4)}
    for _ in range(WARM_UP + 1):
        step(inputs, scale=1.0)
    weight.grad = torch.ones(4)
    step(inputs, scale=1.0)
    first = weight.grad - 1.0
    weight.grad = None
    step(inputs, scale=1.0)
    torch.testing.assert_close(weight.grad, first)
    step(inputs, scale=1.0)
    torch.testing.assert_close(weight.grad, 2 * first)


def test_another_scale_is_another_graph():
    step, weight, _ = make()
    for scale in (1.0, 0.5):
        for _ in range(WARM_UP + 2):
            weight.grad = None
            step({"x": torch.ones(5, 4)}, scale=scale)
        assert torch.allclose(weight.grad, scale * 2 * weight.sum().detach() * torch.ones(4))
    assert len(step._captured) == 2


def test_a_failed_capture_goes_on_by_calling():
    step, weight, _ = make()
    step.fails = True
    plain, expected_weight, _ = make(enabled=False)
    losses, after = trained(step, weight)
    expected_losses, expected_after = trained(plain, expected_weight)
    assert not step.enabled
    assert torch.equal(losses, expected_losses)
    assert torch.equal(after, expected_after)


def test_released_it_calls():
    step, weight, _ = make()
    trained(step, weight)
    step.release()
    assert not step._captured
    step({"x": torch.ones(5, 4)}, scale=1.0)
    assert weight.grad is not None


def test_not_wanted_on_a_cpu():
    said = []
    assert not graphs_wanted("auto", nn.Linear(2, 2), said.append, obstacles={"there is dropout": True})
    assert said == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    def test_replaying_equals_calling(self):
        graphed, weight, unused = make(GraphedStep, "cuda")
        plain, expected_weight, _ = make(GraphedStep, "cuda", enabled=False)
        losses, after = trained(graphed, weight, "cuda", updates=10, sizes=(5, 3))
        expected_losses, expected_after = trained(plain, expected_weight, "cuda", updates=10, sizes=(5, 3))
        assert len(graphed._captured) == 2
        torch.testing.assert_close(losses, expected_losses)
        torch.testing.assert_close(after, expected_after)
        assert unused.grad is None

    def test_what_cannot_be_captured_is_called(self):
        said = []
        weight = nn.Parameter(torch.ones(4, device="cuda"))

        def compute(inputs):
            loss = (inputs["x"] @ weight).mean()
            if loss.item() > -1e9:  # waits for the GPU
                loss.backward()
            return {"loss": loss.detach()}

        step = GraphedStep(compute, [weight], enabled=True, report=said.append)
        stream = torch.cuda.current_stream()
        for _ in range(5):
            weight.grad = None
            loss = step({"x": torch.ones(3, 4, device="cuda")})["loss"]
        assert float(loss) == 4.0
        assert weight.grad.tolist() == [1.0] * 4
        assert len(said) == 1
        assert "without CUDA graphs" in said[0]
        assert torch.cuda.current_stream() == stream
        assert torch.rand(3, device="cuda").isfinite().all()  # the generator works again

    def test_obstacles_are_told(self):
        said = []
        model = nn.Linear(2, 2, device="cuda")
        assert graphs_wanted("auto", model, said.append, obstacles={"there is dropout": False})
        assert not graphs_wanted("auto", model, said.append, obstacles={"there is dropout": True})
        assert said == ["training without CUDA graphs: there is dropout"]
        assert not graphs_wanted("off", model, said.append)

"""Micro-steps and evaluations as CUDA graphs: the host launches one graph instead of thousands of kernels.

A graph repeats the same kernels on the same memory. Inputs are therefore copied into fixed tensors, and
results and gradients out of fixed ones; for the loop a replayed micro-step is like any other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lolcats.errors import first_line
from lolcats.modeling.graphs import side_stream

WARM_UP = 2
"""Ordinary calls before a shape is captured: libraries load and kernels are compiled in them."""

Compute = Callable[..., dict[str, Tensor]]


class Graphs:
    """Calls functions, on a GPU through CUDA graphs: one for every function, set of shapes and constants.

    A function `compute(inputs, **constants)` may run a backward pass, which adds to `.grad`, and returns tensors.
    Nothing in it may wait for the GPU or depend on the inputs' values.

    Args:
        parameters: whose gradients the functions add up.
        enabled: False: always call the functions themselves.
        report: receives one sentence if a capture fails; the functions are called themselves from then on.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, enabled: bool, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.parameters, self.enabled, self.report = list(parameters), enabled, report
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._calls: dict[Any, int] = {}
        self._captured: dict[Any, _Graph] = {}
        self._buffers: dict[nn.Parameter, Tensor] = {}

    def __call__(self, compute: Compute, inputs: dict[str, Tensor], **constants: Any) -> dict[str, Tensor]:
        if not self.enabled:
            return compute(inputs, **constants)
        call = partial(compute, **constants)
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        key = (compute, shapes, tuple(constants.items()))
        if key not in self._captured:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] <= WARM_UP:
                return self._warm_up(call, inputs)
            graph = self._capture(call, inputs)
            if graph is None:
                return call(inputs)
            self._captured[key] = graph
        graph = self._captured[key]
        for name, tensor in inputs.items():
            graph.inputs[name].copy_(tensor, non_blocking=True)
        graph.replay()
        self._add_gradients(graph.gradients)
        return {name: tensor.clone() for name, tensor in graph.results.items()}

    def release(self) -> None:
        """Give the graphs' memory back; from now on the functions are called themselves."""
        self.enabled = False
        self._captured.clear()
        self._buffers.clear()

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """That graphs are captured on; made with the first call."""
        if self._stream is None:
            self._stream, self._pool = side_stream(device), torch.cuda.graph_pool_handle()
        return self._stream

    def _warm_up(self, call: Compute, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """An ordinary call, on the stream of the later capture."""
        device = self.parameters[0].device
        stream, current = self.stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results = call(inputs)
        current.wait_stream(stream)
        for tensor in inputs.values():  # their memory must outlive their use on the other stream
            tensor.record_stream(stream)
        return results

    def _capture(self, call: Compute, inputs: dict[str, Tensor]) -> _Graph | None:
        accumulated = [parameter.grad for parameter in self.parameters]
        device = self.parameters[0].device
        stream = torch.cuda.current_stream(device)
        gc.collect()  # a cycle that holds GPU memory must not be freed in the middle
        try:
            fixed = {name: tensor.clone() for name, tensor in inputs.items()}
            for parameter in self.parameters:
                parameter.grad = None
            graph = torch.cuda.CUDAGraph()
            # All graphs share memory: each one's results are copied out before the next one runs.
            capture = torch.cuda.graph(graph, stream=self.stream(device), pool=self._pool)
            with torch.cuda.device(device), capture:
                results = call(fixed)
            gradients = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
            return _Graph(graph.replay, fixed, results, gradients)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
            self.release()
            # The generator refuses to draw numbers until a capture ends well.
            with suppress(RuntimeError), torch.cuda.device(device), torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=device)
            # The end of a broken capture raises, too; what broke it is the context.
            cause = first_line(error.__context__ or error)
            self.report(f"continuing without CUDA graphs, which this model or its memory does not allow: {cause}")
            return None
        finally:
            for parameter, gradient in zip(self.parameters, accumulated, strict=True):
                parameter.grad = gradient

    def _add_gradients(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """As a backward pass: into `.grad` where there is one, else as the first gradient."""
        first = [parameter for parameter in gradients if parameter.grad is None]
        later = [parameter for parameter in gradients if parameter.grad is not None]
        if later:
            torch._foreach_add_([p.grad for p in later if p.grad is not None], [gradients[p] for p in later])
        if first:
            for parameter in first:
                if parameter not in self._buffers:
                    self._buffers[parameter] = torch.empty_like(gradients[parameter])
                parameter.grad = self._buffers[parameter]
            torch._foreach_copy_([self._buffers[p] for p in first], [gradients[p] for p in first])


class _Graph(NamedTuple):
    """A captured call: its replay and the tensors that it reads and writes."""

    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    gradients: dict[nn.Parameter, Tensor]


def graphs_wanted(
    setting: str, model: nn.Module, report: Callable[[str], None] = lambda text: None, *, has_dropout: bool = False
) -> bool:
    """Whether micro-steps of this model can be captured; on a GPU `report` hears why not."""
    devices = {parameter.device for parameter in model.parameters()}
    if setting == "off" or any(device.type != "cuda" for device in devices):
        return False
    found = ["there is dropout"] if has_dropout else []
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        found.append("the weights are sharded")
    if len(devices) > 1:
        found.append("the model lies on several GPUs")
    if found:
        report(f"training without CUDA graphs: {found[0]}")
    return not found

"""CUDA graphs: calls captured by key, for the engine; and the steps of one generate()."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lolcats.errors import first_line
from lolcats.modeling.attention import ATTENTION_CALL, AttentionCall
from lolcats.modeling.cache import ExactCacheLayer, HybridCacheLayer, Rows, given_cache

TOKENS_AHEAD = 1024  # for which exact heads get memory at once
_TENSORS = {"input_ids", "attention_mask", "position_ids"}


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """For what runs before a capture. One for all: cuBLAS keeps a workspace a stream, 32 MiB on Hopper."""
    return torch.cuda.Stream(device)


class Graphs:
    """Captured calls by key. All share one memory pool: they never run at the same time.

    A model that cannot be captured (it looks at values on the host) runs eagerly, after one warning.

    Args:
        give_up: called with the error of a capture; whether it has changed calls so that another try may succeed.
    """

    def __init__(self, give_up: Callable[[Exception], bool] = lambda error: False) -> None:
        self.give_up = give_up
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pool: Any = None
        self.works = True

    def run(self, key: Hashable, call: Callable[[], Any], warm_up: Callable[[], Any]) -> Any:
        """`call()`, replayed where it was captured before.

        Args:
            call: writes to and reads from fixed addresses only. Its result is overwritten by the next run.
            warm_up: the same work without effects; compiles kernels and fills caches before the capture.
        """
        if not self.works:
            return call()
        while key not in self.captured:
            try:
                self._capture(key, call, warm_up)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                torch.cuda.synchronize()
                # The generator refuses to draw numbers until a capture ends well.
                with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                    torch.zeros(1, device="cuda")
                if self.give_up(error):
                    self.pool = None
                    continue
                if not isinstance(error, RuntimeError):
                    raise
                self.works = False
                warnings.warn(f"generating without CUDA graphs, slower: {first_line(error)}", stacklevel=2)
                return call()
        graph, output = self.captured[key]
        graph.replay()
        return output

    def _capture(self, key: Hashable, call: Callable[[], Any], warm_up: Callable[[], Any]) -> None:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        side = side_stream(torch.device("cuda", torch.cuda.current_device()))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                warm_up()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy to the device meanwhile: only calls of this thread can break the capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output = call()
        self.captured[key] = graph, output


class CapturedSteps:
    """The forward function of one generate(): a GPU is done with a layer long before the host has launched it.

    Steps of one token a row run from and to fixed addresses; when one has left all states where they were, the next is
    captured. Other passes run as they are.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.left = model, 0
        self.addresses: tuple[int, ...] = ()

    def __call__(self, **inputs: Any) -> Any:
        given = {name for name, x in inputs.items() if isinstance(x, Tensor)}
        is_step = {"input_ids", "position_ids"} <= given <= _TENSORS and inputs["input_ids"].shape[1] == 1
        if not is_step or inputs.get(ATTENTION_CALL) is not None:
            return self.model(**inputs)
        past = given_cache(inputs).get_seq_length()
        if self.left == 0:
            self._begin(inputs, past)
        self.left -= 1
        self.token_B1.copy_(inputs["input_ids"])
        before, self.addresses = self.addresses, self._addresses()
        captures = before == self.addresses
        output = self.graphs.run(self.addresses, self._step, lambda: None) if captures else self._step()
        for layer in (*self.hybrid, *self.exact):
            layer.tokens = past + 1
        return output

    def _begin(self, inputs: dict[str, Any], past: int) -> None:
        """Fix the addresses of the next steps."""
        layers, mask = given_cache(inputs).layers, inputs.get("attention_mask")
        self.hybrid = [layer for layer in layers if isinstance(layer, HybridCacheLayer)]
        own = (*layers, *(layer.exact for layer in self.hybrid))
        self.exact = [layer for layer in own if isinstance(layer, ExactCacheLayer) and layer.keys is not None]
        for layer in self.exact:
            layer.reserve(past + TOKENS_AHEAD)
        self.graphs, self.addresses = Graphs(), ()
        self.left, self.end = TOKENS_AHEAD, past + TOKENS_AHEAD
        self.token_B1, self.position = inputs["input_ids"].clone(), inputs["position_ids"].clone()
        batch, device = len(self.token_B1), self.token_B1.device
        self.past_B = torch.full((batch,), past, device=device) if mask is None else mask[:, :past].sum(1)
        self.others = {name: x for name, x in inputs.items() if not isinstance(x, Tensor)}

    def _step(self) -> Any:
        """One token of each row, without a look at values or lengths."""
        rows = Rows(self.end - 1, self.end, self.past_B.clone())
        given = {"input_ids": self.token_B1, "position_ids": self.position, ATTENTION_CALL: AttentionCall(rows=rows)}
        output = self.model(**self.others | given)
        self.past_B += 1
        self.position += 1
        return output

    def _addresses(self) -> tuple[int, ...]:
        """Where the layers keep what a step reads and writes."""
        kept = [layer.state or () for layer in self.hybrid] + [layer.buffers.values() for layer in self.exact]
        return tuple(x.data_ptr() for tensors in kept for x in tensors)

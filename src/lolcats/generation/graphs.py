"""The engine's CUDA graphs: calls captured by key, and the numbers of rows that share one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


def bucket(count: int, most: int) -> int:
    """`count` rounded up to 1, 2, 4, 8 or n * 2^k with n in 4..7: at most a quarter too many.

    >>> [bucket(n, 100) for n in (1, 3, 8, 9, 33, 99)]
    [1, 4, 8, 10, 40, 100]
    """
    if count <= 2:
        return min(count, most)
    unit = 1 << max((count - 1).bit_length() - 3, 0)
    rounded = -(-count // unit) * unit
    return min(max(rounded, 4), most)


class Graphs:
    """Captured calls by key. All share one memory pool: they never run at the same time.

    A model that cannot be captured (it looks at values on the host) runs eagerly, after one warning.

    Args:
        give_up: called with the error of a capture; whether it has changed calls so that another try may succeed.
    """

    def __init__(self, give_up: Callable[[Exception], bool] = lambda error: False) -> None:
        self.give_up = give_up
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool: Any = None
        self.works = True

    def run(self, key: Hashable, call: Callable[[], Tensor], warm_up: Callable[[], Any]) -> Tensor:
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
                if self.give_up(error):
                    self.pool = None
                    continue
                if not isinstance(error, RuntimeError):
                    raise
                self.works = False
                first_line = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(f"generating without CUDA graphs, slower: {first_line}", stacklevel=2)
                return call()
        graph, output = self.captured[key]
        graph.replay()
        return output

    def _capture(self, key: Hashable, call: Callable[[], Tensor], warm_up: Callable[[], Any]) -> None:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
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

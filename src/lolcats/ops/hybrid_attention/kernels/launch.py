"""Launches with little work on the host.

Triton finds the compiled kernel of a launch by looking at all of its arguments, which takes longer than the launch.
Calls that agree in what `eager.signature` says of their tensors launch the same kernels over the same grids, so that
the first of them keeps these in its `Plan`. Memory that a call allocates is aligned, and its layout follows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from lolcats.ops.hybrid_attention.eager import Newest, signature

# Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)
# AMD's kernels also differ in what they assume of the size of a tensor's memory, which is not in the key.
KEPT = torch.version.hip is None
# Integer arguments that change from call to call: kernels are compiled once for all their values.
SIZES = ("tokens", "chunks", "heads", "kv_heads", "sinks_there", "splits", "tiles")

_plans = Newest()
_recording = threading.RLock()  # a plan records one call at a time


class Plan:
    """What the first call with a key did on one device: the memory it took and the kernels it launched.

    Attributes:
        sizes: numbers that the caller keeps with it.
        replay: does the same with other tensors; None before `run`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes: Any = None
        self._known: dict[Hashable, tuple[Callable[..., None], tuple]] = {}
        self._record: _Record | None = None
        self.replay: Callable[[Sequence[Tensor | None]], Any] | None = None

    def run(self, tensors: Sequence[Tensor | None], function: Callable[[], Any]) -> Any:
        """`function()`; from the second time on, the same memory and launches with these tensors.

        Args:
            tensors: all that the launches read.
            function: takes memory and launches through this plan and does nothing else with tensors; returns a tuple of
                what it took, or None.
        """
        if self.replay is not None:
            return self.replay(tensors)
        with _recording:
            self._record = record = _Record([*tensors])
            try:
                results = function()
            finally:
                self._record = None
        given = [id(x) for x in tensors if x is not None and x.numel()]
        if KEPT and len(set(given)) == len(given):  # else it is not known which of two a launch reads
            self.replay = record.replay(results, self.device)
        return results

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the call; where calls are replayed, a tensor without elements is the same in all of them."""
        is_shared = self._record is not None and not all(size)
        with torch.inference_mode(False) if is_shared else nullcontext():
            return self._take(torch.empty(size, dtype=dtype, device=self.device))

    def empty_like(self, x: Tensor) -> Tensor:
        """Memory as one of the call's tensors lies in it."""
        return self._take(torch.empty_like(x))

    def _take(self, made: Tensor) -> Tensor:
        if self._record is not None and made.numel():
            self._record.slots.append(made)
            # With strides it takes less time than `torch.empty`.
            make = partial(torch.empty_strided, made.shape, made.stride(), dtype=made.dtype, device=made.device)
            self._record.memory.append(make)
        return made

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, at: int = 0, **constants: Any) -> None:
        """`kernel[grid](*arguments, **constants)`.

        Args:
            kernel: a function of `triton.jit`. Its constants come last and have no defaults.
            at: tells apart a call's launches of the same kernel.
            constants: and options, as `num_warps`. Kernels whose products feed each other take 4 warps. Triton 3.6 lays
                such products out for Hopper with all warps along the rows, 16 each, however few rows there are. With 8
                warps on 64 rows, and the same sum laid out otherwise in a loop, kernels crashed or had wrong sums.
        """
        known = self._known.get((kernel, at))
        if known is not None:
            run, tail = known
            run(*arguments, *tail, stream=_stream(self.device))
            return
        compiled = _first_launch(kernel, grid, arguments, constants)
        tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        run = _runner(kernel, compiled, grid)
        if KEPT:
            self._known[kernel, at] = run, tail
        if self._record is not None:
            self._record.launches.append((run, arguments, tail))


class _Record:
    """A call's tensors, then its memory; and its launches."""

    def __init__(self, tensors: list[Tensor | None]) -> None:
        self.slots = tensors
        self.memory: list[Callable[[], Tensor]] = []
        self.launches: list[tuple[Callable[..., None], tuple, tuple]] = []

    def replay(self, results: Sequence[Any], device: torch.device) -> Callable[[Sequence[Tensor | None]], Any]:
        """The same call with other tensors."""
        places = {id(x): i for i, x in enumerate(self.slots) if x is not None}
        constants: list[Any] = []
        groups: list[Callable[[list[Any]], Any]] = []
        known: dict[tuple, int] = {}

        def keep(x: Any) -> None:
            """Give a place to what is the same in every call."""
            if id(x) not in places:
                places[id(x)] = len(self.slots) + len(constants)
                constants.append(x)

        def place(x: Any) -> int:
            """In the list of tensors, constants and groups of both."""
            if not isinstance(x, tuple):
                return places[id(x)]
            key = type(x), *map(place, x)
            if key not in known:
                known[key] = len(self.slots) + len(constants) + len(groups)
                get = itemgetter(*key[1:])
                # The interpreter looks for the names of a tuple's fields, a compiled kernel does not.
                groups.append((lambda slots: type(x)._make(get(slots))) if INTERPRETED else get)  # type: ignore[attr-defined]
            return known[key]

        for _, arguments, tail in self.launches:
            for x in (*chain.from_iterable(map(_leaves, arguments)), *tail):
                keep(x)
        for x in results:
            keep(x)
        launches = [
            (run, itemgetter(*map(place, arguments), *(places[id(x)] for x in tail)))
            for run, arguments, tail in self.launches
        ]
        answer, memory = [places[id(x)] for x in results], self.memory

        def replayed(tensors: Sequence[Tensor | None]) -> Any:
            slots: list[Any] = [*tensors]
            slots += [make() for make in memory]
            slots += constants
            for group in groups:
                slots.append(group(slots))
            stream = _stream(device)
            for run, pick in launches:
                run(*pick(slots), stream=stream)
            return tuple([slots[i] for i in answer])

        return replayed


def _leaves(x: Any) -> Iterable[Any]:
    """What an argument of a launch, which may be a tuple, consists of."""
    return chain.from_iterable(map(_leaves, x)) if isinstance(x, tuple) else (x,)


def _stream(device: torch.device) -> Any:
    return None if INTERPRETED else driver.active.get_current_stream(device.index)


def _runner(kernel: Any, compiled: Any, blocks: tuple[int, ...]) -> Callable[..., None]:
    """What launches the kernel again; takes all of its arguments and a stream."""
    if INTERPRETED:
        run = kernel[blocks]
        return lambda *arguments, stream: run(*arguments)
    return compiled[(*blocks, 1, 1)[:3]]


def _first_launch(kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> Any:
    """The compiled kernel."""
    return kernel[grid](*arguments, **constants)


def is_hopper(device: torch.device) -> bool:
    """Whether it is an H100 or an H200; the interpreter passes for one."""
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. `triton.cdiv` is for kernels: called on the host it takes longer than a launch."""
    return -(-a // b)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not less than `size`, which is positive."""
    return 1 << (size - 1).bit_length()


def plan_of(tensors: Sequence[Tensor | None], *others: Hashable) -> Plan:
    """The plan of launches for such tensors; `others` tell apart operators, too."""
    key = (*others, signature(tensors))
    plan = _plans.get(key)
    if plan is None:
        assert tensors[0] is not None
        plan = Plan(tensors[0].device)
        _plans.add(key, plan)
    return plan

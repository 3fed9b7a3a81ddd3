"""Linear layers of at most 64 rows, as in a decoding step: one stream of the weights.

Reading weights is what such a step costs. cuBLAS takes up to half longer, runs layers with the same input one after
the other, and waits with each for the kernel before it. Importing this module needs Triton.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from lolcats.ops.hybrid_attention.kernels.decode import early_launch, wait_for_inputs
from lolcats.ops.hybrid_attention.kernels.tiles import dot

MOST_ROWS = 64
LEAST_WEIGHTS = 1 << 24  # of layers with the same input; smaller ones wait for launches


@torch.library.custom_op("lolcats::few_rows", mutates_args=())
def few_rows(x: Tensor, weights: list[Tensor], gated: bool, residual: Tensor | None) -> list[Tensor]:
    """[x weight^T for weight in weights], or [silu(x gate^T) * (x up^T)] of two; summed in float32.

    Args:
        x: [..., K], in half precision.
        weights: one to three, [N, K], contiguous, in the type of `x`.
        residual: what is added, of one weight.
    """
    inputs = x.shape[-1]
    x_MK = x.reshape(-1, inputs).contiguous()
    rows = len(x_MK)
    if rows > MOST_ROWS:
        ys = [linear(x, weight) for weight in weights]
        if residual is not None:
            return [residual + ys[0]]
        return [silu(ys[0]) * ys[1]] if gated else ys
    sizes = [len(weight) for weight in weights[: 1 if gated else None]]
    ys = [x.new_empty(*x.shape[:-1], size) for size in sizes]
    width, depth, stages = tiles(rows, sum(map(len, weights)), inputs, gated)
    given = [*weights, *[None] * (3 - len(weights)), *ys, *[None] * (3 - len(ys)), *sizes, *[0] * (3 - len(ys))]
    with torch.cuda.device_of(x):
        _kernel[(sum(triton.cdiv(size, width) for size in sizes),)](
            x_MK,
            None if residual is None else residual.contiguous(),
            *given,
            rows,
            K=inputs,
            M=1 if rows == 1 else max(triton.next_power_of_2(rows), 16),
            BN=width,
            BK=depth,
            STAGES=stages,
            GATED=gated,
            num_warps=4,
            **early_launch(x.device),
        )
    return ys


@few_rows.register_fake
def _(x: Tensor, weights: list[Tensor], gated: bool, residual: Tensor | None) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], len(weight)) for weight in weights[: 1 if gated else None]]


def tiles(rows: int, outputs: int, inputs: int, gated: bool) -> tuple[int, int, int]:
    """Outputs and inputs that a program takes at a time, and how many such tiles of weights are on their way.

    The fastest on an H200 for the layers of Llama 3 8B.
    """
    if rows == 1:
        depth = min(inputs & -inputs, 1024 if inputs > 8192 else 2048)
        return (2048 if gated else 4096) // depth, depth, 2
    depth = 128 if inputs % 128 == 0 else 64
    if gated:
        return 64, depth, 4
    if outputs > 16384:
        return 128, depth, 4
    return 32 if rows > 32 and outputs < 6144 else 64, depth, 6


def use_few_rows(graph: torch.fx.GraphModule) -> bool:
    """Put `few_rows` in the place of large linear layers, of those with the same input together, and of the sums and
    gates that follow them. Returns whether layers are large."""
    by_input: dict[Any, list[Any]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="call_function", target=linear):
        if not node.kwargs and node.args[1].op in ("placeholder", "get_attr"):
            by_input[node.args[0]].append(node)
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    changes = [place for node, place in order.items() if _in_place(node)]
    found, replaced = False, set()
    for nodes in by_input.values():
        weights = [node.args[1].meta["example_value"] for node in nodes]
        if sum(x.numel() for x in weights) < LEAST_WEIGHTS or len(nodes) > 3 or weights[0].shape[1] % 64:
            continue
        if any(x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous() for x in weights):
            continue
        found = True
        if nodes[0].meta["example_value"].shape[:-1].numel() == 1 and weights[0].shape[1] % 1024:
            continue  # one row's weights in narrow tiles are slow: Inductor's sums
        biases = {node: node.args[2] for node in nodes if len(node.args) > 2 and node.args[2] is not None}
        gated = _gated(*nodes) if not biases and len(nodes) == 2 else None
        added = _added(*nodes) if not biases and len(nodes) == 1 else None
        residual = next(x for x in added.args if x is not nodes[0]) if added else None
        outputs = [gated or added] if gated or added else nodes
        if any(order[nodes[0]] < place < order[outputs[-1]] for place in changes):
            continue
        with graph.graph.inserting_before(outputs[0]):
            call = graph.graph.call_function
            given = nodes[0].args[0], [node.args[1] for node in nodes], gated is not None, residual
            ys = call(few_rows._opoverload, given)
            for index, node in enumerate(outputs):
                y = call(operator.getitem, (ys, index))
                y = call(operator.add, (y, biases[node])) if node in biases else y
                y.meta.update(node.meta)  # its shape, for what follows
                node.replace_all_uses_with(y)
        replaced |= {*nodes, *outputs} | ({gated.args[0]} if gated else set())
    for node in reversed(graph.graph.nodes):  # what else has no use may change a tensor in place
        if node in replaced:
            graph.graph.erase_node(node)
    graph.recompile()
    return found


def _in_place(node: Any) -> bool:
    """Whether a node may change one of its arguments."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv", "setitem")


def _gated(gate: Any, up: Any) -> Any:
    """The node silu(gate) * up, if gate and up have no other use."""
    activated = next(iter(gate.users), gate)
    product = next(iter(activated.users), gate)
    once = len(gate.users) == len(activated.users) == len(up.users) == 1
    found = once and activated.target is silu and product.target is operator.mul
    return product if found and product.args == (activated, up) else None


def _added(y: Any) -> Any:
    """The node residual + y, if y has no other use."""
    user = next(iter(y.users), None)
    if user is None or len(y.users) > 1 or user.target is not operator.add or y is user.args[0] is user.args[1]:
        return None
    values = [x.meta["example_value"] for x in user.args if isinstance(x, torch.fx.Node)]
    kinds = [(x.dtype, list(x.shape)) for x in values if isinstance(x, Tensor)]
    return user if len(kinds) == 2 and kinds[0] == kinds[1] else None


@triton.jit
def _product(weight_NK, x_MK, acc, OUTPUTS_FIRST: tl.constexpr):
    """acc + the product, [N, M] or [M, N]."""
    return dot(weight_NK, x_MK.T, acc) if OUTPUTS_FIRST else dot(x_MK, weight_NK.T, acc)


@triton.jit
def _ask_for(address):
    """The lines of these addresses come to the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _sums(x, weight_N1, second_N1, K: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr):
    """One or two products [N, 1] with one row, summed in registers. Weights are read a tile ahead, the first ones
    before the input is there."""
    k = tl.arange(0, BK)[None, :]
    weight_NK = tl.load(weight_N1 + k)
    second_NK = tl.load(second_N1 + k) if GATED else weight_NK
    wait_for_inputs(EARLY)
    acc_NK = tl.zeros(weight_NK.shape, tl.float32)
    up_NK = acc_NK
    for begin in range(0, K, BK):
        part_1K = tl.load(x + k + begin).to(tl.float32)
        later = begin + BK + k
        weights_NK, weight_NK = weight_NK, tl.load(weight_N1 + later, mask=later < K)
        acc_NK += weights_NK.to(tl.float32) * part_1K
        if GATED:
            seconds_NK, second_NK = second_NK, tl.load(second_N1 + later, mask=later < K)
            up_NK += seconds_NK.to(tl.float32) * part_1K
    return tl.sum(acc_NK, 1)[:, None], tl.sum(up_NK, 1)[:, None]


@triton.jit
def _kernel(
    x,
    residual,
    weight,
    second,
    third,
    y,
    second_y,
    third_y,
    outputs,
    second_outputs,
    third_outputs,
    rows,
    K: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: BN columns of a result. Rows and columns beyond the ends repeat the last ones and are not stored.

    Several rows go through the matrix units, the larger side first, which Hopper's want: the outputs, where there are
    enough.
    """
    OUTPUTS_FIRST: tl.constexpr = M == 1 or BN >= 64
    dtype: tl.constexpr = y.dtype.element_ty
    index = tl.program_id(0)
    if second_y is not None:
        tiles = tl.cdiv(outputs, BN)
        if index >= tiles:
            index, weight, y, outputs = index - tiles, second, second_y, second_outputs
            if third_y is not None:
                tiles = tl.cdiv(outputs, BN)
                if index >= tiles:
                    index, weight, y, outputs = index - tiles, third, third_y, third_outputs
    n = index * BN + tl.arange(0, BN)
    m = tl.arange(0, M)
    k = tl.arange(0, BK)[None, :]
    x += tl.minimum(m, rows - 1)[:, None] * K
    row_N1 = tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * K
    weight += row_N1
    if GATED:
        second += row_N1
    if M == 1:
        acc, up = _sums(x, weight, second, K, BK, GATED, EARLY)
    else:
        if EARLY:
            line = tl.minimum(tl.arange(0, 8) * 64, K - 64)[None, :]  # of 128 bytes: the first of each row
            _ask_for(weight + line)
            if GATED:
                _ask_for(second + line)
        wait_for_inputs(EARLY)
        acc = tl.zeros([BN, M] if OUTPUTS_FIRST else [M, BN], tl.float32)
        up = acc
        for begin in tl.range(0, K, BK, num_stages=STAGES):
            part_MK = tl.load(x + k + begin)
            acc = _product(tl.load(weight + k + begin), part_MK, acc, OUTPUTS_FIRST)
            if GATED:
                up = _product(tl.load(second + k + begin), part_MK, up, OUTPUTS_FIRST)
    acc = acc.to(dtype)
    if GATED:
        gate = acc.to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(dtype)
        acc = (gate.to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)
    m, n = (m[None, :], n[:, None]) if OUTPUTS_FIRST else (m[:, None], n[None, :])
    place, inside = m * outputs + n, (m < rows) & (n < outputs)
    if residual is not None:
        acc = (acc.to(tl.float32) + tl.load(residual + place, mask=inside).to(tl.float32)).to(dtype)
    tl.store(y + place, acc, mask=inside)

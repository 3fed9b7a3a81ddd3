"""One token of hybrid attention with a state, in two launches: the decoding step on a GPU.

The first, without a linear part none, makes the features of the queries, many sequences a program so that they share
the weights, and adds to S and z the tokens that leave the window. The second only reads the states. A program takes
one sequence and one key/value head, and reads ring and state once for all of its query heads: exact keys (this token,
sinks, ring) with running softmax sums, then the state. Where there are few sequences, several programs
divide the columns of the values and of S, and each reads all keys.

In memory S is [B, S, F, D], float32, or of 16-bit models [B, S, 2, F, D] in planes of which the second launch reads
the first (`planes.py`); z is [B, S, F], float32; rings [B, G, C, D] hold the token at position p in slot p % C,
sinks are [B, G, sinks, D], in the type of the keys. All writes go to the state's own tensors, so a step can be captured
in a CUDA graph. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.launch import cdiv, early_launch, is_eager, next_power_of_2
from lolcats.ops.hybrid_attention.kernels.op import SETTINGS, config_of
from lolcats.ops.hybrid_attention.kernels.shape import FeatureMaps, KernelShape, Rows, in_log2, padded
from lolcats.ops.hybrid_attention.kernels.step_kernel import prepare_kernel, step_kernel
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.planes import in_planes
from lolcats.ops.hybrid_attention.state import HybridState

# Programs divide the columns of the values until there are so many: two for each multiprocessor of a large GPU.
ENOUGH_PROGRAMS = 264
# Programs that fold, at most: eight for each multiprocessor. Those that find nothing to do take their time, too.
MOST_FOLDING = 1056
# Rows of a tile that tensor cores take, and columns of the narrowest.
LEAST = 16
# Launches of the step for few and for many sequences: the fastest of twenty on an H200, head_dim 128.
_FEW = {"BN": 64, "BF": 128, "num_warps": 4, "num_stages": 3}
_MANY = {"BN": 32, "BF": 32, "num_warps": 2, "num_stages": 2}
_FLOAT32 = {"BN": 32, "BF": 32, "num_warps": 4, "num_stages": 2}
# Sequences of a tile of features.
MOST_SEQUENCES = 64
_TENSORS = 16  # the operator's first arguments


class RowStrides(NamedTuple):
    """Entries from one sequence's state to the next, in S, z, the ring and the sinks."""

    S: int
    z: int
    ring: int
    sinks: int


class StateParts(NamedTuple):
    """Tensors of a `HybridState` in the order in which the operator takes them."""

    S: Any
    z: Any
    k: Any
    v: Any
    sink_k: Any
    sink_v: Any
    position: Any


def triton_step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    state: HybridState,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1.

    Weights may have any floating type. Tensors of `state` that are not contiguous are copied, and S of 16-bit models is
    split in planes; the returned state has the copies.
    """
    scoring = params.scale_of(q_BH1D), params.softcap
    if not all(x.is_contiguous() for x in state.values()):
        state = state.map(torch.Tensor.contiguous)
    state = state.as_steps_keep(q_BH1D.dtype)
    tensors = (
        *[x if x.stride(-1) == 1 else x.contiguous() for x in (q_BH1D, k_BG1D, v_BG1D)],
        *[None if x is None else x.contiguous() for x in params.tensors],
        *state.values(),
    )
    if is_eager(tensors):
        return _launch_step(tensors, config, *scoring), state
    return step_op(*tensors, *[getattr(config, name) for name in SETTINGS], *scoring), state


@torch.library.custom_op(
    "lolcats::hybrid_attention_step",
    mutates_args=("S", "z", "ring_k", "ring_v", "sink_k", "sink_v", "position"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gamma, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias,"
    " Tensor? k_bias, Tensor? sink_logits, Tensor(a!) S, Tensor(b!) z, Tensor(c!) ring_k,"
    " Tensor(d!) ring_v, Tensor(e!) sink_k, Tensor(f!) sink_v, Tensor(g!) position,"
    " str window, int window_size, int window_blocks, int sinks, str? feature_map, int linear_length_cap,"
    " float scale, float? softcap)"
    " -> Tensor",
)
def step_op(*arguments):
    """y [B, H, 1, D]; the state's tensors, contiguous, become those after this token."""
    tensors, (*settings, scale, softcap) = arguments[:_TENSORS], arguments[_TENSORS:]
    return _launch_step(tensors, config_of(*settings), scale, softcap)


def paged_step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    config: AttentionConfig,
    params: HybridParams,
    *,
    parts: dict[str, Tensor],
    page_B: Tensor,
    position_B: Tensor,
    y_BH1D: Tensor,
    heads_G: Tensor | None = None,
) -> None:
    """One token of each sequence, whose states are read and written where they lie. Nothing waits for the device.

    Args:
        parts: the fields of `HybridState` but the position, each [pages, ...], dense in all axes but the first.
        page_B: each sequence's place in `parts`, int32; sequences with a negative one do not exist.
        position_B: int64, tokens that each sequence has seen. At 0 what its page holds is not used. It is not changed.
        y_BH1D: is written, and is anything for sequences that do not exist.
        heads_G: int64, the key/value heads that have states and parameters, where q, k, v and y have others beside
            them, which are not read or written; None: all.
    """
    own = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_BH1D, k_BG1D, v_BG1D)]
    state = [parts.get(name, position_B) for name in StateParts._fields]
    tensors = (*own, *[None if x is None else x.contiguous() for x in params.tensors], *state, page_B, y_BH1D, heads_G)
    scoring = params.scale_of(q_BH1D), params.softcap
    _launch_step(tensors, config, *scoring)


def _launch_step(tensors: tuple[Any, ...], config: AttentionConfig, scale: float, softcap: float | None) -> Tensor:
    """`tensors` of the operator; for states in pages then the pages, the output and the heads that have states."""
    q, k, v, gamma, q_weight, k_weight, q_bias, k_bias, sink_logits, *parts = tensors[:_TENSORS]
    state = StateParts(*parts)
    page, y, table = tensors[_TENSORS:] or (None, torch.empty_like(q), None)
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    if table is not None:
        heads, kv_heads = heads // kv_heads * len(table), len(table)
    state_heads, columns = (kv_heads, 1) if k_weight is None else (k_weight.shape[0], k_weight.shape[2])
    shape = KernelShape.of(config, q.dtype, heads, kv_heads, state_heads, head_dim, columns)
    shape = shape._replace(PB=padded(shape.P), SB=padded(shape.SINKS))  # the smallest tiles
    rows = [Rows(x, x.stride(0), x.stride(1), 0) for x in (q, k, v, y)]
    strides = RowStrides(*[x.stride(0) for x in (state.S, state.z, state.k, state.sink_k)])
    where = (page, state, strides)
    phi = None
    if k_weight is not None:
        sizes = (batch, heads, shape.F)
        phi = q.new_empty(sizes, dtype=torch.bfloat16 if in_planes(state.S) else torch.float32)
        tile = min(max(next_power_of_2(batch), LEAST), MOST_SEQUENCES)
        prepare_kernel[(cdiv(batch, tile) * heads + min(batch * state_heads, MOST_FOLDING),)](
            *rows[:3],
            phi,
            FeatureMaps(q_weight, k_weight, q_bias, k_bias),
            table,
            *where,
            batch,
            kv_heads,
            M=tile,
            shape=shape,
            num_warps=4,
            **early_launch(q.device),
        )
    split = programs_of_a_head(batch * kv_heads, shape.DB)
    step_kernel[(batch * kv_heads * split,)](
        *rows[:3],
        phi,
        rows[3],
        gamma,
        sink_logits,
        table,
        *where,
        kv_heads,
        in_log2(scale),
        in_log2(softcap),
        CAP=config.linear_length_cap,
        SPLIT=split,
        M=max(next_power_of_2(shape.REPEATS), LEAST),
        **(_FLOAT32 if q.dtype == torch.float32 else _FEW if split > 1 else _MANY),
        shape=shape,
        **early_launch(q.device),
    )
    return y


@step_op.register_fake
def _(q, *_):
    return torch.empty_like(q)


def programs_of_a_head(heads: int, columns: int) -> int:
    """How many programs divide the columns of each of `heads` key/value heads of all sequences: a power of two."""
    count = 1
    while 2 * count * heads <= ENOUGH_PROGRAMS and columns > LEAST * count:
        count *= 2
    return count

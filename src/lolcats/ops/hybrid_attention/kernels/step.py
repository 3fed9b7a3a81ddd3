"""One token of hybrid attention with a state, in one launch: the decoding step on a GPU.

The kernel is in `step_kernel`. With a sparse cache, the block that leaves the window competes for its slots before the
launch, see `sparse_cache.fold_block`. All writes go to the state's own tensors, so a step can be captured in a CUDA
graph. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.constants import LOG2_E
from lolcats.ops.hybrid_attention.kernels.operands import or_dummy
from lolcats.ops.hybrid_attention.kernels.step_kernel import step_kernel
from lolcats.ops.hybrid_attention.kernels.tiles import padded
from lolcats.ops.hybrid_attention.kernels.tuning import WIDE_ROW_BYTES
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.sparse_cache import fold_block
from lolcats.ops.hybrid_attention.state import HybridState

# A program takes several sequences, and its weights serve them all, where this many programs remain: four for
# each multiprocessor of a large GPU.
ENOUGH_PROGRAMS = 528
# Rows of a tile that tensor cores take; sequences of one program share them.
ROWS = 16
# Sequences of a program at most. More share the weights, but come one after another: slower on an H200.
MOST_SEQUENCES = 2
# Tensors of a `HybridState` in the order in which the operator takes them.
STATE_PARTS = ("S", "z", "k", "v", "sink_k", "sink_v", "cache_k", "cache_v", "position")


def triton_step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    v_BG1D: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None,
    state: HybridState,
    mask: Tensor | None,
    inplace: bool,
    block_evicted: bool = True,
) -> tuple[Tensor, HybridState]:
    """See `hybrid_attention`, T = 1. A sequence whose `mask` [B, 1] is False keeps its state.

    `block_evicted`: False, if the caller knows that no block competes for a sparse cache. Weights may have any floating
    type. Tensors of `state` that are not contiguous are copied; the returned state has the copies.
    """
    state = state.map(torch.Tensor.contiguous) if inplace else state.map(_copy)
    if spec.sparse_cache and block_evicted:
        comes_B = torch.ones_like(state.position, dtype=torch.bool) if mask is None else mask[:, 0].bool()
        state.copy_(fold_block(spec, params, state, comes_B))
    y_BH1D = step_op(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (q_BH1D, k_BG1D, v_BG1D)),
        *(None if x is None else x.contiguous() for x in params),
        None if mask is None else mask.bool(),
        *(getattr(state, name) for name in STATE_PARTS),
        spec.window,
        spec.window_size,
        spec.window_blocks,
        spec.sinks,
        spec.feature_map,
        spec.linear_length_cap,
        scale,
        softcap,
    )
    return y_BH1D, state


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "lolcats::hybrid_attention_step",
    mutates_args=("S", "z", "ring_k", "ring_v", "sink_k", "sink_v", "position"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gamma, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias,"
    " Tensor? k_bias, Tensor? sink_logits, Tensor? mask, Tensor(a!) S, Tensor(b!) z, Tensor(c!) ring_k,"
    " Tensor(d!) ring_v, Tensor(e!) sink_k, Tensor(f!) sink_v, Tensor cache_k, Tensor cache_v, Tensor(g!) position,"
    " str window, int window_size, int blocks, int sinks, str? feature_map, int linear_length_cap,"
    " float scale, float? softcap)"
    " -> Tensor",
)
def step_op(
    q,
    k,
    v,
    gamma,
    q_weight,
    k_weight,
    q_bias,
    k_bias,
    sink_logits,
    mask,
    S,
    z,
    ring_k,
    ring_v,
    sink_k,
    sink_v,
    cache_k,
    cache_v,
    position,
    window,
    window_size,
    blocks,
    sinks,
    feature_map,
    linear_length_cap,
    scale,
    softcap,
):
    """y [B, H, 1, D]; the state's tensors, contiguous, become those after this token. The cache stays as it is."""
    y = torch.empty_like(q)
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    columns = 1 if k_weight is None else k_weight.shape[2]
    sequences = _sequences(batch, kv_heads, heads // kv_heads)
    is_wide = padded(head_dim) * q.dtype.itemsize > WIDE_ROW_BYTES
    step_kernel[(triton.cdiv(batch, sequences) * kv_heads,)](
        q,
        k,
        v,
        gamma,
        or_dummy(q_weight, q),
        or_dummy(k_weight, q),
        or_dummy(q_bias, q),
        or_dummy(k_bias, q),
        or_dummy(sink_logits, q),
        or_dummy(mask, q),
        S,
        z,
        ring_k,
        ring_v,
        sink_k,
        sink_v,
        cache_k,
        cache_v,
        position,
        y,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *y.stride()[:2],
        0 if mask is None else mask.stride(0),
        batch,
        scale * LOG2_E,
        0.0 if softcap is None else softcap * LOG2_E,
        HAS_MASK=mask is not None,
        HAS_CAP=softcap is not None,
        HAS_BIAS=q_bias is not None,
        HAS_SINK_LOGITS=sink_logits is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        STATE_HEADS=1 if k_weight is None else k_weight.shape[0],
        D=head_dim,
        P=columns,
        MAP=feature_map or "none",
        SLIDING=window == "sliding" or window_size == 0,
        W=window_size,
        BLOCKS=blocks,
        SINKS=sinks,
        HORIZON=linear_length_cap,
        CACHE=cache_k.shape[2],
        N=sequences,
        M=max(triton.next_power_of_2(sequences * (heads // kv_heads)), ROWS),
        DB=padded(head_dim),
        PB=padded(columns),
        SB=padded(sinks),
        BN=32 if is_wide else 64,
        num_warps=4,
        num_stages=2 if is_wide else 3,
    )
    return y


@step_op.register_fake
def _(q, *_):
    return torch.empty_like(q)


def _sequences(batch: int, kv_heads: int, repeats: int) -> int:
    """Sequences of one program: a power of two whose query heads fit into one tile."""
    count = 1
    while count < MOST_SEQUENCES and 2 * count * repeats <= ROWS and batch * kv_heads >= 2 * count * ENOUGH_PROGRAMS:
        count *= 2
    return count

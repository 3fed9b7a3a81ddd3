"""Cross-entropy and its gradient in two passes over the logits, which the gradient overwrites.

PyTorch takes about ten passes, most of them over float32 copies. liger-kernel has such a kernel, but what
calls it waits for the GPU to count the labels. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 8192


def cross_entropy_and_gradient_(logits_LV: Tensor, label_L: Tensor, factor: float = 1.0) -> Tensor:
    """[L] float32 cross-entropy of softmax(factor * logits); `logits_LV` becomes its gradient, in its type.

    Args:
        logits_LV: contiguous.
        label_L: int64, each in [0, V).
        factor: positive.
    """
    loss_L = torch.empty(len(label_L), dtype=torch.float32, device=logits_LV.device)
    if len(label_L):
        columns = logits_LV.shape[1]
        block = min(MAX_BLOCK, triton.next_power_of_2(columns))
        _kernel[(len(label_L),)](
            logits_LV,
            label_L.contiguous(),
            loss_L,
            columns,
            factor,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )
    return loss_L


@triton.jit
def _kernel(logits_ptr, label_ptr, loss_ptr, columns, factor, BLOCK: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    offsets = tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row)
    # Largest logit and sum of exponentials so far, of every lane apart; joined at the end.
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        x = tl.load(logits_ptr + begin + offsets, mask=inside, other=float("-inf")).to(tl.float32) * factor
        higher = tl.maximum(top, x)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = higher
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    chosen = tl.load(logits_ptr + label).to(tl.float32) * factor
    tl.store(loss_ptr + row, log_sum - chosen)
    tl.debug_barrier()  # all threads have read the label's logit before it is overwritten
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        x = tl.load(logits_ptr + begin + offsets, mask=inside, other=float("-inf")).to(tl.float32) * factor
        gradient = tl.exp(x - log_sum) - tl.where(begin + offsets == label, 1.0, 0.0)
        tl.store(logits_ptr + begin + offsets, (gradient * factor).to(logits_ptr.dtype.element_ty), mask=inside)

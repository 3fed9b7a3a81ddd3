"""Softmax attention as the original model computes it, for layers that keep it and for the teacher.

Shapes as in `lolcats.ops`: queries [B, H, T, D]; keys and values [B, G, K, D] with K >= T, aligned at the
end: query i stands at key K - T + i.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout as random_dropout
from torch.nn.functional import scaled_dot_product_attention

from lolcats.ops.eight_bits import is_packed, unpack
from lolcats.ops.hybrid_attention.api import has_kernel, supports_softmax_step
from lolcats.ops.hybrid_attention.state import Scoring, needs_gradient

# Masked attention runs over blocks of queries, so that no T x T matrix is built.
QUERY_BLOCK = 1024
_before: list[bool] = []  # whether PyTorch took cuDNN's attention before each block of `any_length` that is open
_lock = RLock()  # a finalizer may leave a block while its thread is entering another


class Visible(NamedTuple):
    """Which of the keys up to its own a query sees: by default all.

    Attributes:
        sliding_window: its own and the `sliding_window - 1` before it.
        sinks: with a window, the first `sinks` of its sequence, too. Between them and those that the first query's
            window reaches keys may be missing.
        cu_seqlens: the borders, from 0, of sequences that are one row of queries; each sees only keys of its own. A
            list or a tensor.
        key_borders: of their keys; None: K = T.
        length: [B] int, at least 1, for one query: the first `length` keys of its row, in whatever order they come;
            nothing else counts then.
    """

    sliding_window: int | None = None
    sinks: int = 0
    cu_seqlens: Any = None
    key_borders: Sequence[int] | None = None
    length: Tensor | None = None


@contextmanager
def any_length() -> Iterator[None]:
    """Within the block PyTorch's attention starts at once for new lengths: on Hopper it takes cuDNN's otherwise, which
    plans some tenths of a second for each (https://github.com/modelscope/FunASR/issues/3704)."""
    with _lock:
        _before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            first = _before[0]
            _before.pop()
            if not _before:
                torch.backends.cuda.enable_cudnn_sdp(first)


def softmax_attention(
    q_BHTD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    scoring: Scoring = Scoring(),
    visible: Visible = Visible(),
    *,
    dropout: float = 0.0,
) -> Tensor:
    """Causal softmax attention; linear memory in T unless dropout, softcap or sink logits need the weights.

    Keys and values may be packed into 8 bits (`eight_bits`).

    Args:
        dropout: probability of dropping an attention weight.

    Returns:
        [B, H, T, D].
    """
    tokens, keys, groups = q_BHTD.shape[2], k_BGKD.shape[2], q_BHTD.shape[1] // k_BGKD.shape[1]
    sliding_window, sinks, cu_seqlens, key_borders, length = visible
    if sliding_window is None or sliding_window + sinks >= keys:
        sliding_window, sinks = None, 0
    forward_only = dropout == 0.0 and not needs_gradient(q_BHTD, k_BGKD, v_BGKD)
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        of_keys = borders if key_borders is None else key_borders
        plain = sliding_window is None and forward_only and not scoring.needs_scores
        if plain and q_BHTD.is_cuda and borders[-1] and takes_window(q_BHTD, k_BGKD, v_BGKD):
            return _of_sequences(q_BHTD, k_BGKD, v_BGKD, borders, of_keys, scoring.scale_of(q_BHTD))
        y, varied = [], len(borders) > 2 and not torch.compiler.is_compiling()  # it would break compiled graphs
        with any_length() if varied else nullcontext():
            for (begin, end), (first, last) in zip(pairwise(borders), pairwise(of_keys), strict=True):
                if begin < end:
                    part = q_BHTD[:, :, begin:end], k_BGKD[:, :, first:last], v_BGKD[:, :, first:last]
                    y.append(softmax_attention(*part, scoring, Visible(sliding_window, sinks), dropout=dropout))
        return torch.cat(y, dim=2) if y else q_BHTD[..., : v_BGKD.shape[3]]
    takes = partial(supports_softmax_step, q_BHTD, k_BGKD, v_BGKD)
    if length is not None and forward_only and has_kernel("auto", q_BHTD, takes):
        from lolcats.ops.hybrid_attention.kernels.softmax_step import softmax_step  # imports Triton

        return softmax_step(q_BHTD, k_BGKD, v_BGKD, length, scoring)
    if is_packed(k_BGKD):
        k_BGKD, v_BGKD = unpack(k_BGKD, q_BHTD.dtype), unpack(v_BGKD, q_BHTD.dtype)
    if tokens == 1:
        visible_BK = None
        if length is not None:
            visible_BK = torch.arange(keys, device=length.device) < length[:, None]
        elif sliding_window is not None:
            k_BGKD, v_BGKD = (_ends(x, sinks, keys - sliding_window, keys) for x in (k_BGKD, v_BGKD))
        # The heads of a group are queries of one key/value head, which is read once.
        q_BGRD = q_BHTD.squeeze(2).unflatten(1, (-1, groups))
        mask = None if visible_BK is None else visible_BK[:, None, None]
        return _attend(q_BGRD, k_BGKD, v_BGKD, mask, scoring, dropout).flatten(1, 2)[:, :, None]
    scale, needs_scores = scoring.scale_of(q_BHTD), scoring.needs_scores
    if not needs_scores and sliding_window is None and tokens == keys:
        return scaled_dot_product_attention(
            q_BHTD, k_BGKD, v_BGKD, dropout_p=dropout, scale=scale, enable_gqa=groups > 1, is_causal=True
        )

    if not needs_scores and forward_only and takes_window(q_BHTD, k_BGKD, v_BGKD):
        window_size = keys + 1 if sliding_window is None else sliding_window  # FlashAttention takes that for none
        return window_attention(q_BHTD, k_BGKD, v_BGKD, window_size, sinks, scale=scale)

    k_BHKD, v_BHKD = k_BGKD, v_BGKD
    if groups > 1:  # with a mask, SDPA's fast kernels need the heads repeated
        k_BHKD, v_BHKD = k_BGKD.repeat_interleave(groups, 1), v_BGKD.repeat_interleave(groups, 1)
    outputs = []
    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        last, first = keys - tokens + end, 0
        if sliding_window is not None:
            first = max(keys - tokens + begin - sliding_window + 1, 0)
        ends = min(sinks, first), first, last
        column_K = torch.arange(last, device=k_BGKD.device)
        key_1K, query_T1 = _ends(column_K, *ends, dim=0)[None], column_K[keys - tokens + begin :, None]
        mask = key_1K <= query_T1
        if sliding_window is not None:
            mask = mask & ((key_1K > query_T1 - sliding_window) | (key_1K < sinks))
        block = q_BHTD[:, :, begin:end], _ends(k_BHKD, *ends), _ends(v_BHKD, *ends)
        outputs.append(_attend(*block, mask, scoring, dropout))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _ends(x: Tensor, head: int, first: int, last: int, dim: int = 2) -> Tensor:
    """The first `head` entries, and those from `first` up to `last`."""
    tail = x.narrow(dim, first, last - first)
    return tail if head == 0 else torch.cat([x.narrow(dim, 0, head), tail], dim)


def _attend(
    q_BHTD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: Tensor | None, scoring: Scoring, dropout: float
) -> Tensor:
    """Softmax attention over the keys of a mask (bool, broadcast to [B, H, T, K]); or of queries [B, G, R, D].

    Where SDPA cannot do it, the scores are materialised; their softmax is float32 or wider.
    """
    scale, softcap, sinks = scoring.scale_of(q_BHTD), scoring.softcap, scoring.sink_logits
    if not scoring.needs_scores:
        return scaled_dot_product_attention(q_BHTD, k_BHKD, v_BHKD, attn_mask=mask, dropout_p=dropout, scale=scale)
    score = q_BHTD @ k_BHKD.transpose(-1, -2) * scale
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.to(score.dtype).view(score.shape[1], -1, 1).expand(*score.shape[:-1], 1)
        weight = torch.cat([score, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weight = score.softmax(-1)
    weight = random_dropout(weight, dropout, training=dropout > 0)
    return weight.to(v_BHKD.dtype) @ v_BHKD


# After a past, within a window and to the first tokens, by FlashAttention's own masks. Others send PyTorch to its
# memory-efficient kernel, which computes what the mask hides, too. For inference alone: the logarithms of the sums, by
# which both parts are joined, have no gradient.


def takes_window(q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> bool:
    """Whether `window_attention` runs: on an NVIDIA GPU from Ampere on, in half precision."""
    if not q_BHTD.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(q_BHTD.device) < (8, 0):
        return False
    head_dim = q_BHTD.shape[-1]
    half = all(x.dtype == q_BHTD.dtype and x.dtype in (torch.bfloat16, torch.float16) for x in (q_BHTD, k_BGKD, v_BGKD))
    return half and head_dim == v_BGKD.shape[-1] and head_dim % 8 == 0 and head_dim <= 256


def window_attention(
    q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, window: int, sinks: int, *, scale: float
) -> Tensor:
    """[B, H, T, D] of queries that end with the keys: each sees its own and the `window - 1` keys before it, and sinks.

    Args:
        k_BGKD: K >= T keys in the order of their tokens; see `softmax_attention` for those that may be missing.
        sinks: the first keys, which every query sees.
    """
    tokens, keys, groups = q_BHTD.shape[2], k_BGKD.shape[2], q_BHTD.shape[1] // k_BGKD.shape[1]
    apart = keys - tokens >= sinks  # the window's keys can do without them
    begin = sinks if apart else 0
    y_BHTD, log_sum_BHT = _within(q_BHTD, k_BGKD[:, :, begin:], v_BGKD[:, :, begin:], window, scale)
    if sinks == 0:
        return y_BHTD
    k_BHSD, v_BHSD = (x[:, :, :sinks].repeat_interleave(groups, 1) for x in (k_BGKD, v_BGKD))
    score_BHTS = (q_BHTD @ k_BHSD.mT).to(log_sum_BHT.dtype) * scale
    if not apart:  # the window has them first
        place = torch.arange(keys, device=q_BHTD.device)
        score_BHTS = score_BHTS.masked_fill(place[:sinks] > place[keys - tokens :, None] - window, -math.inf)
    total_BHT1 = torch.logaddexp(log_sum_BHT, score_BHTS.logsumexp(-1))[..., None]
    y_sinks_BHTD = (score_BHTS - total_BHT1).exp() @ v_BHSD.to(log_sum_BHT.dtype)
    return ((log_sum_BHT[..., None] - total_BHT1).exp() * y_BHTD + y_sinks_BHTD).to(q_BHTD.dtype)


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host as a tensor; without waiting for what a GPU has yet to do."""
    values = torch.as_tensor(values, dtype=dtype)
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def _of_sequences(
    q_1HND: Tensor, k_1GKD: Tensor, v_1GKD: Tensor, borders: Sequence[int], of_keys: Sequence[int], scale: float
) -> Tensor:
    """Causal attention within sequences by one call: to launch one for each takes the host longer than the GPU."""
    cu_2N = upload([[*borders], [*of_keys]], q_1HND.device, torch.int32)
    longest = (max(end - begin for begin, end in pairwise(ends)) for ends in (borders, of_keys))
    q_NHD, k_KGD, v_KGD = (x[0].transpose(0, 1) for x in (q_1HND, k_1GKD, v_1GKD))
    attend = torch.ops.aten._flash_attention_forward
    y_NHD, *_ = attend(q_NHD, k_KGD, v_KGD, *cu_2N, *longest, 0.0, True, False, scale=scale)
    return y_NHD.transpose(0, 1)[None]


def _within(q_BHTD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within a window [B, H, T, D], and the logarithm of its denominators [B, H, T], float32."""
    q_BTHD, k_BKGD, v_BKGD = (x.transpose(1, 2) for x in (q_BHTD, k_BGKD, v_BGKD))
    sizes = q_BHTD.shape[2], k_BGKD.shape[2]
    reach = {"window_size_left": window - 1, "window_size_right": 0}
    attend = torch.ops.aten._flash_attention_forward
    y_BTHD, log_sum_BHT, *_ = attend(q_BTHD, k_BKGD, v_BKGD, None, None, *sizes, 0.0, True, False, scale=scale, **reach)
    return y_BTHD.transpose(1, 2), log_sum_BHT

"""Deliberately wrong implementations: each has one fault that a property test must notice.

Most are faults that were measured in published code; each is right where its fault does not matter, so
that a test which passes it by accident is easy to write.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib import import_module
from unittest import mock

import torch
from hybrid_cases import chunked, reference
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.ops import HybridState
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map

CHUNKED = import_module("lolcats.ops.hybrid_attention.chunked")
REFERENCE = import_module("lolcats.ops.hybrid_attention.reference")


@dataclass(frozen=True)
class _Shifted(AttentionConfig):
    """Blocks counted as if `shift` tokens came before the sequence."""

    shift: int = 0

    def window_start(self, position: Tensor) -> Tensor:
        return (super().window_start(position + self.shift) - self.shift).clamp_min(0)


def blocks_from_the_end(q, k, v, spec, params, **options):
    """The last block of the sequence is full, the first one may be ragged."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    shifted = _Shifted(**values, shift=-q.shape[2] % spec.window_size)
    return reference(q, k, v, shifted, params, **options)


def linear_terms_in_the_window(q, k, v, spec, params, **options):
    """Keys of the window have a linear weight, too."""
    right = REFERENCE.reference_weights

    def weights(q, k, phi_q, phi_k, spec, *rest):
        window, in_window = right(q, k, None, None, spec, *rest)
        everything, all_of_it = right(q, k, phi_q, phi_k, replace(spec, window_size=0, sinks=0), *rest)
        return window + everything, in_window + all_of_it

    with mock.patch.object(REFERENCE, "reference_weights", weights):
        return reference(q, k, v, spec, params, **options)


def chunk_forgets_the_ring(q, k, v, spec, params, **options):
    """A chunk sees the sums and its own tokens, not those waiting in the window."""

    def no_positions(position_B: Tensor, capacity: int) -> Tensor:
        return position_B.new_full((len(position_B), capacity), -1)

    with mock.patch.object(REFERENCE, "ring_positions", no_positions):
        return reference(q, k, v, spec, params, **options)


def chunk_drops_what_passes_the_window(q, k, v, spec, params, *, state=None, return_state=False, **options):
    """Only tokens that were in the ring are ever folded: what enters and leaves within a chunk is lost."""
    y, after = chunked(q, k, v, spec, params, state=state, return_state=return_state, **options)
    if after is None:
        return y, after
    first = torch.zeros_like(after.position) if state is None else state.position
    position_BT = first[:, None] + torch.arange(q.shape[2])
    lost_BT = (position_BT >= spec.sinks) & (position_BT < spec.window_start(after.position - 1)[:, None])
    spread = after.S.shape[1] // k.shape[1]
    phi = get_feature_map(spec.feature_map)
    phi_k = phi(k.repeat_interleave(spread, 1), params.k_weight, params.k_bias) * lost_BT[:, None, :, None]
    lost_S = phi_k.transpose(-1, -2) @ v.repeat_interleave(spread, 1)
    return y, replace(after, S=after.S - lost_S, z=after.z - phi_k.sum(-2))


def terraced_prefill_sliding_decode(q, k, v, spec, params, *, state=None, **options):
    """Single tokens use the last `capacity` tokens instead of the blocks."""
    if state is not None and q.shape[2] == 1:
        spec = replace(spec, window="sliding", window_size=spec.capacity)
    return chunked(q, k, v, spec, params, state=state, **options)


def bf16_state(q, k, v, spec, params, *, return_state=False, **options):
    """The sums are kept in bfloat16 between calls."""
    y, after = chunked(q, k, v, spec, params, return_state=return_state, **options)
    if after is None:
        return y, after
    return y, replace(after, S=after.S.bfloat16().to(after.S.dtype), z=after.z.bfloat16().to(after.z.dtype))


def padding_ignored(q, k, v, spec, params, *, mask=None, **options):
    """Padding tokens are tokens like all others."""
    y, after = chunked(q, k, v, spec, params, **options)
    return (y if mask is None else y.masked_fill(~mask[:, None, :, None], 0.0)), after


def documents_ignored(q, k, v, spec, params, *, segment_ids=None, **options):
    """Packed documents see each other."""
    y, after = chunked(q, k, v, spec, params, **options)
    return (y if segment_ids is None else y.masked_fill((segment_ids < 0)[:, None, :, None], 0.0)), after


def row_maximum_detached(q, k, v, spec, params, **options):
    """c_n taken for a mere stabiliser: no gradient runs through it."""
    right = torch.Tensor.amax
    with mock.patch.object(torch.Tensor, "amax", lambda self, *a, **b: right(self, *a, **b).detach()):
        return chunked(q, k, v, spec, params, **options)


def log_sum_exp_for_row_maximum(q, k, v, spec, params, **options):
    """Window terms normalised by their own sum: another mix of the two parts."""
    with mock.patch.object(torch.Tensor, "amax", lambda self, *a, **b: self.logsumexp(*a, **b)):
        return chunked(q, k, v, spec, params, **options)


def groups_interleaved(q, k, v, spec, params, **options):
    """In the linear part query head h reads state h % S instead of h // (H / S)."""
    right = CHUNKED._linear_part
    heads = torch.arange(q.shape[1])

    def linear_part(q, k, v, spec, params, *rest):
        state_heads = params.k_weight.shape[0]
        order = heads.view(-1, state_heads).T.flatten()  # heads 0, S, 2S, ... first
        bias = None if params.q_bias is None else params.q_bias[order]
        moved = params._replace(q_weight=params.q_weight[order], q_bias=bias)
        numerator, denominator, S, z = right(q[:, order], k, v, spec, moved, *rest)
        back = order.argsort()
        return numerator[:, back], denominator[:, back], S, z

    with mock.patch.object(CHUNKED, "_linear_part", linear_part):
        return chunked(q, k, v, spec, params, **options)


def length_cap_within_the_call(q, k, v, spec, params, **options):
    """The linear_length_cap counts tokens from the first one at hand, not from the start of the sequence."""
    right = AttentionConfig.gamma_at

    def gamma_at(self, gamma: Tensor, position_B1X1: Tensor) -> Tensor:
        return right(self, gamma, position_B1X1 - position_B1X1.amin(2, keepdim=True))

    with mock.patch.object(AttentionConfig, "gamma_at", gamma_at):
        return chunked(q, k, v, spec, params, **options)


def writes_into_the_given_state(q, k, v, spec, params, *, inplace=False, **options):
    """Decodes in place whether or not the caller allowed it."""
    return chunked(q, k, v, spec, params, inplace=True, **options)


def one_position_for_all(q, k, v, spec, params, *, state: HybridState | None = None, **options):
    """All sequences of a batch continue where the longest one stands."""
    if state is not None:
        state = replace(state, position=state.position.max().expand_as(state.position).clone())
    return chunked(q, k, v, spec, params, state=state, **options)

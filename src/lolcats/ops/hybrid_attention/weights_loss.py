"""Cross-entropy between the weights of softmax attention and of hybrid attention: a loss of attention transfer.

With unnormalised hybrid weights a_nj, their sum A_n, h_nj = a_nj / A_n and the softmax weights p_nj, query n has
the loss -sum_j p_nj log h_nj; its derivative for a_nj is (sum_i p_ni - p_nj / h_nj) / A_n. Both come from one pass
over blocks of queries, so that no matrix of weights outlives its block. Only the window's keys, few, need masks:
padding comes after all real tokens of a row, where real queries do not look.

Shape suffixes as in `spec`, with N sequences of L tokens; of one block T queries, J keys up to them, W keys of their
windows, V = W and the sinks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR, HybridParams
from lolcats.ops.hybrid_attention.weights import AlignedRows


def weights_cross_entropy(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    spec: AttentionConfig,
    params: HybridParams,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    block: int = 128,
) -> Tensor:
    """Mean over heads and real queries of -sum_j softmax_nj log hybrid_nj (arXiv:2402.04347); a scalar.

    The softmax weights are constants. Arguments as `attention_weights`.

    Args:
        block: queries taken at a time, with the keys up to them; the result is the same.
    """
    with torch.autocast(q_BHTD.device.type, enabled=False):
        rows = AlignedRows.of(q_BHTD, k_BGTD, spec, mask, segment_ids)
        heads = rows.q.shape[1]
        dtype = rows.q.dtype
        share_NL = rows.valid_NT.to(dtype) / (rows.valid_NT.sum() * heads)
        others = [x for x in (q_BHTD, k_BGTD, params.sink_logits) if x is not None]
        if spec.feature_map is None or (torch.is_grad_enabled() and any(x.requires_grad for x in others)):
            return _as_written(rows, spec, params, share_NL, scale, softcap, sliding_window, block)

        assert params.q_weight is not None
        assert params.k_weight is not None
        phi = get_feature_map(spec.feature_map)
        repeats = heads // params.k_weight.shape[0]
        q_bias, k_bias = (None if bias is None else bias.to(dtype) for bias in (params.q_bias, params.k_bias))
        phi_q_NHLF = phi(rows.q, params.q_weight.to(dtype), q_bias)
        phi_k_NSLF = phi(rows.k[:, ::repeats], params.k_weight.to(dtype), k_bias)
        phi_k_NHLF = phi_k_NSLF.repeat_interleave(repeats, 1)
        sink_H11 = None if params.sink_logits is None else params.sink_logits.to(dtype)[:, None, None]
        scores = _Scores(rows.q, rows.k, sink_H11, scale, softcap, sliding_window)
        return _CrossEntropy.apply(phi_q_NHLF, phi_k_NHLF, params.gamma.to(dtype), scores, share_NL, spec, block)


def _as_written(
    rows: AlignedRows,
    spec: AttentionConfig,
    params: HybridParams,
    share_NL: Tensor,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    block: int,
) -> Tensor:
    """With gradients of everything; autograd keeps the weights."""
    crosses = []
    for begin in range(0, share_NL.shape[1], block):
        end = min(begin + block, share_NL.shape[1])
        hybrid, softmax = rows.weights(begin, end, spec, params, scale, softcap, sliding_window)
        # Entries without softmax weight drop out; the floor keeps the logarithm of the others finite.
        crosses.append(-(softmax.detach() * hybrid.clamp_min(DENOMINATOR_FLOOR).log()).sum(-1))
    return (torch.cat(crosses, dim=-1) * share_NL[:, None]).sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss, with gradients of the features and of gamma, which the forward pass computes if any is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        phi_q_NHLF: Tensor,
        phi_k_NHLF: Tensor,
        gamma_H: Tensor,
        scores: _Scores,
        share_NL: Tensor,
        spec: AttentionConfig,
        block: int,
    ) -> Tensor:
        inputs = (phi_q_NHLF, phi_k_NHLF, gamma_H)
        gradients = tuple(map(torch.zeros_like, inputs)) if any(ctx.needs_input_grad) else None
        loss = share_NL.new_zeros(())
        for begin in range(0, share_NL.shape[1], block):
            end = min(begin + block, share_NL.shape[1])
            loss += _add_block(begin, end, *inputs, scores, share_NL[:, None, begin:end, None], spec, gradients)
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        ctx.has_softmax = spec.has_softmax
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        phi_q, phi_k, gamma = (gradient * saved for saved in ctx.saved_tensors)
        return phi_q, phi_k, (gamma if ctx.has_softmax else None), None, None, None, None


class _Scores(NamedTuple):
    """What the scores are made of: queries [N, H, L, D], keys with the query heads, and what becomes of q . k."""

    q: Tensor
    k: Tensor
    sink_H11: Tensor | None
    scale: float
    softcap: float | None
    sliding_window: int | None

    def of(self, begin: int, end: int) -> Tensor:
        """[N, H, T, J]: queries `begin` to `end`, keys up to them."""
        k_NHDJ = self.k[:, :, :end].transpose(-1, -2)
        if self.softcap is None:
            return (self.q[:, :, begin:end] * self.scale) @ k_NHDJ
        return ((self.q[:, :, begin:end] * (self.scale / self.softcap)) @ k_NHDJ).tanh_().mul_(self.softcap)

    def soft_part(self, score_NHTV: Tensor, soft_TV: Tensor) -> tuple[Tensor, Tensor]:
        """exp(score - maximum) of the keys in the softmax part, else 0; the sum, with the sink logit's."""
        score_NHTV = score_NHTV.masked_fill(~soft_TV, -torch.inf)
        top_NHT1 = score_NHTV.amax(-1, keepdim=True)
        if self.sink_H11 is not None:
            top_NHT1 = torch.maximum(top_NHT1, self.sink_H11)
        soft_NHTV = score_NHTV.sub_(top_NHT1).exp_()
        mass_NHT1 = soft_NHTV.sum(-1, keepdim=True)
        if self.sink_H11 is not None:
            mass_NHT1 += (self.sink_H11 - top_NHT1).exp()
        return soft_NHTV, mass_NHT1

    def softmax(self, score_NHTJ: Tensor, begin: int, start: int) -> tuple[Tensor, Tensor | None]:
        """Weights over the keys alone, and the part [N, H, T, 1] of the whole that a sink logit leaves them.

        Overwrites the scores. All queries see the keys before `start`, but for the sliding window.
        """
        first = 0 if self.sliding_window else start
        tokens, keys = score_NHTJ.shape[2:]
        key_J = torch.arange(first, keys, device=score_NHTJ.device)
        query_T1 = torch.arange(begin, begin + tokens, device=score_NHTJ.device)[:, None]
        hidden_TJ = key_J > query_T1
        if self.sliding_window:
            hidden_TJ |= key_J <= query_T1 - self.sliding_window
        score_NHTJ[..., first:].masked_fill_(hidden_TJ, -torch.inf)
        left_NHT1 = None
        if self.sink_H11 is not None:
            left_NHT1 = (score_NHTJ.logsumexp(-1, keepdim=True) - self.sink_H11).sigmoid()
        return score_NHTJ.softmax(-1), left_NHT1


class _Columns:
    """The keys of queries `begin` to `end`: first the sinks that all of these see, then far ones, then the window.

    Attributes:
        sinks, start: where far keys, which are linear for all queries, begin and end.
        linear_TW: which keys of the window are in the linear part of the query.
        soft_TV: which sinks and keys of the window are in the softmax part.
    """

    def __init__(self, spec: AttentionConfig, begin: int, end: int, device: torch.device) -> None:
        self.start = int(spec.window_start(torch.tensor(begin, device="cpu")))  # not asked of a GPU
        self.sinks = min(spec.sinks, self.start)
        query_T1 = torch.arange(begin, end, device=device)[:, None]
        near_V = self.near(torch.arange(end, device=device))
        visible_TV = near_V <= query_T1
        soft_TV = (near_V >= spec.window_start(query_T1)) | (near_V < spec.sinks)
        self.soft_TV = visible_TV & soft_TV
        self.linear_TW = (visible_TV & ~soft_TV)[:, self.sinks :]

    def near(self, x_J: Tensor) -> Tensor:
        """[..., J] -> [..., V]: sinks and window side by side."""
        window_W = x_J[..., self.start :]
        return torch.cat([x_J[..., : self.sinks], window_W], dim=-1) if self.sinks else window_W

    def linear_only_(self, x_NHTJ: Tensor) -> Tensor:
        """Writes zeros outside the linear part."""
        x_NHTJ[..., : self.sinks].zero_()
        x_NHTJ[..., self.start :].masked_fill_(~self.linear_TW, 0.0)
        return x_NHTJ


def _add_block(
    begin: int,
    end: int,
    phi_q_NHLF: Tensor,
    phi_k_NHLF: Tensor,
    gamma_H: Tensor,
    scores: _Scores,
    share_N1T1: Tensor,
    spec: AttentionConfig,
    gradients: tuple[Tensor, ...] | None,
) -> Tensor:
    """What queries `begin` to `end` add to the loss; adds their part to `gradients` of phi_q, phi_k and gamma."""
    columns = _Columns(spec, begin, end, share_N1T1.device)
    sinks, start = columns.sinks, columns.start
    gamma_H11 = gamma_H[:, None, None]
    phi_q_NHTF, phi_k_NHJF = phi_q_NHLF[:, :, begin:end], phi_k_NHLF[:, :, :end]
    score_NHTJ = scores.of(begin, end)

    # The sum of all unnormalised weights needs those of the softmax part, and features summed over the linear part.
    linear_TW = columns.linear_TW.to(gamma_H.dtype)
    linear_NHTF = phi_k_NHJF[:, :, sinks:start].sum(2, keepdim=True) + linear_TW @ phi_k_NHJF[:, :, start:]
    sum_NHT1 = (phi_q_NHTF * linear_NHTF).sum(-1, keepdim=True)
    if spec.has_softmax:
        soft_NHTV, mass_NHT1 = scores.soft_part(columns.near(score_NHTJ), columns.soft_TV)
        if spec.linear_length_cap:
            query_T1 = torch.arange(begin, end, device=gamma_H.device)[:, None]
            factor_T1 = spec.gamma_at(torch.ones_like(gamma_H[:1]), query_T1)
            soft_NHTV, mass_NHT1 = soft_NHTV.mul_(factor_T1), mass_NHT1.mul_(factor_T1)
        sum_NHT1 += gamma_H11 * mass_NHT1
    floored_NHT1 = sum_NHT1.clamp_min(DENOMINATOR_FLOOR)

    hybrid_NHTJ = columns.linear_only_((phi_q_NHTF / floored_NHT1) @ phi_k_NHJF.transpose(-1, -2))
    if spec.has_softmax:
        factor_NHT1 = gamma_H11 / floored_NHT1
        hybrid_NHTJ[..., :sinks].addcmul_(factor_NHT1, soft_NHTV[..., :sinks])
        hybrid_NHTJ[..., start:].addcmul_(factor_NHT1, soft_NHTV[..., sinks:])
    hybrid_NHTJ.clamp_(min=DENOMINATOR_FLOOR)
    softmax_NHTJ, left_NHT1 = scores.softmax(score_NHTJ, begin, start)
    share_NHT1 = share_N1T1 if left_NHT1 is None else share_N1T1 * left_NHT1
    loss = -(torch.special.xlogy(softmax_NHTJ, hybrid_NHTJ).sum(-1, keepdim=True) * share_NHT1).sum()
    if gradients is None:
        return loss

    # softmax / hybrid; no gradient passes where the floor stands for the hybrid weight.
    ratio_NHTJ = softmax_NHTJ.div_(torch.threshold_(hybrid_NHTJ, DENOMINATOR_FLOOR, torch.inf))
    from_soft_NHT1 = torch.zeros_like(sum_NHT1)
    if spec.has_softmax:
        from_soft_NHT1 = (columns.near(ratio_NHTJ) * soft_NHTV).sum(-1, keepdim=True)
    pulled_NHTF = columns.linear_only_(ratio_NHTJ) @ phi_k_NHJF
    # The sum's own derivative: the softmax weights where no floor stands, times 1 / sum.
    counted_NHT1 = (phi_q_NHTF * pulled_NHTF).sum(-1, keepdim=True) + gamma_H11 * from_soft_NHT1
    counted_NHT1 *= (sum_NHT1 >= DENOMINATOR_FLOOR) / floored_NHT1

    phi_q_gradient, phi_k_gradient, gamma_gradient = gradients
    back_NHT1 = -share_NHT1 / floored_NHT1
    drawn_NHTF = back_NHT1 * phi_q_NHTF
    counted_NHTF = counted_NHT1 * drawn_NHTF
    phi_q_gradient[:, :, begin:end] = back_NHT1 * (pulled_NHTF - counted_NHT1 * linear_NHTF)
    phi_k_gradient[:, :, :end].add_(ratio_NHTJ.transpose(-1, -2) @ drawn_NHTF)
    phi_k_gradient[:, :, sinks:start].sub_(counted_NHTF.sum(2, keepdim=True))
    phi_k_gradient[:, :, start:end].sub_(linear_TW.T @ counted_NHTF)
    if spec.has_softmax:
        gamma_gradient += (back_NHT1 * (from_soft_NHT1 - counted_NHT1 * mass_NHT1)).sum((0, 2, 3))
    return loss

"""A model with linear heads alone, with the exact heads asked for, and with softmax attention: what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lolcats.plan import costs
from lolcats.plan.costs import FLOAT, WEIGHT
from lolcats.plan.shape import ModelShape
from lolcats.plan.ways import Request


@dataclass(frozen=True)
class Arm:
    """One of them.

    Attributes:
        stage_flops: of the stages that it goes through, by stage; the teachers' passes count in the gates alone.
        cache_bytes: of one sequence, by its tokens.
        sequences: whose caches fit on one GPU beside the weights, by their tokens.
        prefill_flops: to read one sequence, by its tokens.
    """

    name: str
    exact_heads: int
    stage_flops: dict[str, float]
    cache_bytes: dict[int, int]
    sequences: dict[int, int]
    prefill_flops: dict[int, float]


def side_by_side(shape: ModelShape, request: Request, lengths: Sequence[int]) -> list[Arm]:
    """All linear, with exact heads if any were asked for, and softmax.

    Args:
        lengths: tokens of a sequence.
    """
    linear, chosen = shape.with_exact({}), shape.after_gates
    arms = [_arm("all linear", linear, request, lengths, transfer=linear)]
    if chosen.exact_heads > linear.exact_heads:
        name = f"{chosen.exact_heads} of {chosen.kv_heads} KV heads exact"
        arms.append(_arm(name, chosen, request, lengths, transfer=shape, gates=bool(shape.chosen)))
    return [*arms, _arm("softmax", shape.softmax, request, lengths)]


def _arm(
    name: str,
    shape: ModelShape,
    request: Request,
    lengths: Sequence[int],
    *,
    transfer: ModelShape | None = None,
    gates: bool = False,
) -> Arm:
    """One arm.

    Args:
        transfer: the model of stage 1; None: there is no stage 1.
        gates: whether gates choose heads.
    """
    length, gate_length = request.sequence_length, request.gates.sequence_length
    flops = {}
    if transfer is not None:
        per_token = costs.transfer_flops(transfer.layers, length, shape.mean_window)
        flops["transfer"] = request.trained_tokens * per_token
    if gates and transfer is not None:
        per_token = costs.gates_flops(transfer, gate_length, gradient_checkpointing=False)
        flops["gates"] = request.gate_tokens * (per_token + costs.frozen_flops(transfer.layers, gate_length))
    flops["adjust"] = request.trained_tokens * costs.adjust_flops(shape, length, request.adjust)
    caches = {tokens: shape.cache_bytes(tokens) for tokens in lengths}
    free = request.memory_bytes - shape.parameters * WEIGHT - shape.feature_parameters * FLOAT
    return Arm(
        name=name,
        exact_heads=shape.exact_heads,
        stage_flops=flops,
        cache_bytes=caches,
        sequences={tokens: max(0, int(free // size)) for tokens, size in caches.items()},
        prefill_flops={tokens: tokens * costs.forward_flops(shape, tokens) for tokens in lengths},
    )

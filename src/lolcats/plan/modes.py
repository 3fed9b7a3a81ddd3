"""Every way of training, with its memory, time and disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lolcats.config import AdjustSection
from lolcats.plan import blockwise, memory, work
from lolcats.plan.gpus import GB
from lolcats.plan.memory import Memory, Step
from lolcats.plan.request import ModePlan, Request
from lolcats.plan.shape import ModelShape
from lolcats.plan.throughput import rate

CHECKPOINTING, OFFLOAD, FOUR_BIT = "gradient checkpointing", "cpu offload", "4-bit"
WHOLE = "whole weights on each"

MODES: dict[str, str] = {
    "joint": "all layers on one GPU",
    "sharded": "all layers, batches divided, weights sharded with FSDP2 if not said otherwise",
    "streaming": "one block after the other on one GPU",
    "jobs": "independent jobs over hidden states computed before",
    "pipelined": "a block on each GPU, hidden states sent on",
    "lora": "stage 2 on one GPU",
    "lora-sharded": "stage 2, batches divided, weights sharded with FSDP2 if not said otherwise",
}


GPU_COUNTS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tried to say how many would do."""


def all_modes(shape: ModelShape, request: Request) -> list[ModePlan]:
    """Plans of every mode that the number of GPUs allows, in the order of `MODES`."""
    several = request.gpus > 1
    plans = [_joint(shape, request), _joint(shape, request, FOUR_BIT)]
    if several:
        plans += [_sharded(shape, request, *options) for options in ((WHOLE,), (), (OFFLOAD,))]
    plans += [blockwise.streaming(shape, request), blockwise.jobs(shape, request)]
    if several:
        plans.append(blockwise.pipelined(shape, request))
    plans += [_lora(shape, request, *options) for options in ((), (CHECKPOINTING,), (CHECKPOINTING, FOUR_BIT))]
    if several:
        choices: tuple[tuple[str, ...], ...] = ((WHOLE,), (), (CHECKPOINTING,), (CHECKPOINTING, OFFLOAD))
        plans += [_lora_sharded(shape, request, *options) for options in choices]
    return [_with_remedy(plan, plans, shape, request) for plan in plans]


def _with_remedy(plan: ModePlan, plans: list[ModePlan], shape: ModelShape, request: Request) -> ModePlan:
    """The plan, if it lacks memory with what would do instead."""
    if plan.needed <= request.memory_bytes or plan.missing is None or plan.block_layers is not None:
        return plan
    remedies = [
        f"block by block it fits (--mode {other.mode} --block-layers {other.block_layers})"
        for other in plans
        if plan.stage == other.stage and other.mode == "streaming" and other.missing is None
    ]
    sharded = _sharded if plan.stage == "transfer" else _lora_sharded
    options = tuple(option for option in plan.options if option == CHECKPOINTING)
    for gpus in sorted({*GPU_COUNTS, request.gpus} - {1}):
        wider = replace(request, gpus=gpus, batch_size=-(-request.batch_size // gpus) * gpus, micro_batch_size=1)
        if gpus >= request.gpus and sharded(shape, wider, *options).missing is None:
            remedies.append(f"sharded over {gpus} GPUs it fits (--gpus {gpus} --batch-size {wider.batch_size})")
            break
    return replace(plan, missing="; ".join([plan.missing, *remedies]))


def _joint(shape: ModelShape, request: Request, *options: str) -> ModePlan:
    def of(size: int) -> ModePlan:
        step = Step(size, request.sequence_length)
        held = memory.transfer(shape, shape.layers, step, beside=_outside(shape))
        if FOUR_BIT in options:
            held = memory.quantised(held, shape, step)
        return _transfer_plan("joint", shape, request, size, held, options)

    return _largest_micro_batch(of, request)


def _sharded(shape: ModelShape, request: Request, *options: str) -> ModePlan:
    offload = OFFLOAD in options

    def of(size: int) -> ModePlan:
        step = Step(size, request.sequence_length, graphs=False)
        held = memory.transfer(shape, shape.layers, step, beside=_outside(shape))
        if WHOLE not in options:
            held = memory.sharded(held, shape, step, request.gpus, offload=offload)
        plan = _transfer_plan("sharded", shape, request, size, held, options)
        return _over_gpus(plan, shape, request, passes=0 if WHOLE in options else 1, offload=offload)

    return _largest_micro_batch(of, request, request.gpus)


def _lora(shape: ModelShape, request: Request, *options: str) -> ModePlan:
    def of(size: int) -> ModePlan:
        step = Step(size, request.sequence_length)
        held = memory.adjust(shape, step, _stage_2(request, options))
        if FOUR_BIT in options:
            held = memory.quantised(held, shape, step)
        return _adjust_plan("lora", shape, request, step, held, options)

    return _largest_micro_batch(of, request)


def _lora_sharded(shape: ModelShape, request: Request, *options: str) -> ModePlan:
    offload = OFFLOAD in options

    def of(size: int) -> ModePlan:
        step = Step(size, request.sequence_length, graphs=False)
        held = memory.adjust(shape, step, _stage_2(request, options))
        if WHOLE not in options:
            held = memory.sharded(held, shape, step, request.gpus, offload=offload)
        plan = _adjust_plan("lora-sharded", shape, request, step, held, options)
        passes = 3 if work.teacher(shape, step.length, request.adjust) else 2
        return _over_gpus(plan, shape, request, passes=0 if WHOLE in options else passes, offload=offload)

    return _largest_micro_batch(of, request, request.gpus)


def _stage_2(request: Request, options: tuple[str, ...]) -> AdjustSection:
    return request.adjust.model_copy(update={"gradient_checkpointing": CHECKPOINTING in options})


def _outside(shape: ModelShape) -> int:
    return shape.embedding + shape.head + shape.other


def _transfer_plan(
    mode: str, shape: ModelShape, request: Request, size: int, held: Memory, options: tuple[str, ...]
) -> ModePlan:
    flops = request.trained_tokens * work.transfer(shape.layers, request.sequence_length, shape.mean_window)
    speed = rate(request.gpu, "transfer", shape.hidden, size * request.sequence_length)
    return ModePlan(
        stage="transfer",
        mode=mode,
        gpus=1,
        micro_batch_size=size,
        memory=held,
        trained=shape.feature_parameters,
        flops=flops,
        seconds=flops / speed.tflop_s / 1e12,
        rate=speed,
        options=options,
    )


def _adjust_plan(
    mode: str, shape: ModelShape, request: Request, step: Step, held: Memory, options: tuple[str, ...]
) -> ModePlan:
    config, tokens = _stage_2(request, options), request.trained_tokens
    student, teacher = (tokens * of(shape, step.length, config) for of in (work.adjust, work.teacher))
    speed, forward = (rate(request.gpu, stage, shape.hidden, step.tokens) for stage in ("adjust", "frozen"))
    return ModePlan(
        stage="adjust",
        mode=mode,
        gpus=1,
        micro_batch_size=step.sequences,
        memory=held,
        trained=shape.lora_parameters(config.lora_rank) + config.train_feature_maps * shape.feature_parameters,
        flops=student + teacher,
        seconds=(student / speed.tflop_s + teacher / forward.tflop_s) / 1e12,
        rate=speed,
        options=options,
        evaluation=memory.evaluation(shape, step),
    )


def _over_gpus(plan: ModePlan, shape: ModelShape, request: Request, *, passes: int, offload: bool) -> ModePlan:
    """The same data-parallel: a micro-step takes as long as its products and the weights' way to the GPU together, of
    which measured runs hide little behind each other. What is trained is small, and so are its gradients' sums.

    Args:
        passes: times that every layer's weights are gathered in a micro-step.
    """
    gpus = request.gpus
    weights = sum(layer.parameters for layer in shape.layers) * Step(1, 1).element
    steps = request.trained_tokens / (plan.micro_batch_size * request.sequence_length * gpus)
    times = {
        "compute": plan.seconds / gpus,
        "link": steps * passes * weights * (1 - 1 / gpus) / request.link_bytes_s,
        "host": steps * passes * weights / gpus / (request.gpu.host_gb_s * GB) if offload else 0.0,
    }
    limit = max(times, key=lambda name: times[name])
    host = shape.parameters * Step(1, 1).element if offload else 0.0
    seconds = times["compute"] + max(times["link"], times["host"])
    return replace(plan, gpus=gpus, seconds=seconds, limit=limit, host=host)


def _largest_micro_batch(of: Callable[[int], ModePlan], request: Request, ranks: int = 1) -> ModePlan:
    """The plan with the largest micro-batch that fits; with the smallest, and what is missing, if none does."""
    sizes = request.micro_batches(ranks)
    if not sizes:
        wanted = request.micro_batch_size or 1
        reason = (
            f"a batch of {request.batch_size} sequences does not divide into micro-batches of {wanted} on {ranks} GPUs;"
            f" use --batch-size {ranks * wanted}"
        )
        return replace(of(wanted), missing=reason)
    plans: Iterator[ModePlan] = (of(size) for size in sizes)
    fitting = next((plan for plan in plans if plan.needed <= request.memory_bytes), None)
    return fitting or blockwise.with_missing_memory(of(sizes[-1]), request)

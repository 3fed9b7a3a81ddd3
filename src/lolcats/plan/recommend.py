"""Which of the plans to take, and the command that does it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lolcats.plan.modes import CHECKPOINTING, FOUR_BIT, OFFLOAD, WHOLE
from lolcats.plan.request import ModePlan, Request

# Modes of stage 1 and stage 2 that one `lolcats linearize` runs one after the other.
TOGETHER = {
    ("joint", "lora"),
    ("streaming", "lora"),
    ("sharded", "lora-sharded"),
    ("pipelined", "lora-sharded"),
    ("jobs", "lora"),
    ("jobs", "lora-sharded"),
}
SHARED_FLAGS = {
    WHOLE: "--set parallel.shard=off",
    OFFLOAD: "--set parallel.cpu_offload=true",
    FOUR_BIT: "--set model.load_in_4bit=true",
}


@dataclass(frozen=True)
class Recommendation:
    """Commands to run in this order (most often one), and the plans that they carry out."""

    commands: tuple[str, ...]
    plans: tuple[ModePlan, ...]

    @property
    def hours(self) -> float:
        return sum(plan.hours for plan in self.plans)


def recommend(model: str, plans: Iterable[ModePlan], request: Request) -> Recommendation | None:
    """The fastest way through both stages; one stage alone if the other does not fit; None if nothing fits."""
    possible = [plan for plan in plans if plan.missing is None]
    first = [plan for plan in possible if plan.stage == "transfer"]
    second = [plan for plan in possible if plan.stage == "adjust"]
    pairs = [(one, two) for one in first for two in second if _go_together(one, two)]
    if pairs:
        best = min(pairs, key=lambda pair: (pair[0].hours + pair[1].hours, len(pair[0].options + pair[1].options)))
        return Recommendation(_commands(model, best, request), best)
    alone = first or second
    if not alone:
        return None
    plan = min(alone, key=lambda plan: (plan.hours, len(plan.options)))
    return Recommendation(_commands(model, (plan,), request), (plan,))


def _go_together(one: ModePlan, two: ModePlan) -> bool:
    """What is set for the whole run must be the same in both stages."""
    same = all((option in one.options) == (option in two.options) for option in SHARED_FLAGS)
    return (one.mode, two.mode) in TOGETHER and (same or one.mode == "jobs")


def _commands(model: str, plans: tuple[ModePlan, ...], request: Request) -> tuple[str, ...]:
    if plans[0].mode != "jobs":
        return (_linearize(model, plans, request),)
    last = _linearize(model, plans, request) if len(plans) > 1 else "lolcats blocks assemble jobs/ -o out/"
    return (*_jobs(model, plans[0], request), last)


def _linearize(model: str, plans: tuple[ModePlan, ...], request: Request) -> str:
    parts = [_launcher(plans[-1].gpus, request), "linearize", *_data(model, request), "-o out/"]
    sizes = {plan.stage: plan.micro_batch_size for plan in plans}
    if len(set(sizes.values())) == 1:
        parts.append(f"--micro-batch-size {plans[0].micro_batch_size}")
    else:
        parts += [f"--set {stage}.micro_batch_size={size}" for stage, size in sizes.items()]
    options = {option for plan in plans for option in plan.options}
    for plan in plans:
        if plan.block_layers is not None:
            parts.append(f"--block-layers {plan.block_layers} --block-mode {plan.mode}")
        if plan.mode == "jobs":
            parts.append("--job-folder jobs/")
    parts += [flag for option, flag in SHARED_FLAGS.items() if option in options]
    if not options & {WHOLE, OFFLOAD} and any(plan.mode in ("sharded", "lora-sharded") for plan in plans):
        parts.append("--set parallel.shard=on")
    if CHECKPOINTING in options:
        parts.append("--set adjust.gradient_checkpointing=true")
    if "adjust" in sizes:
        parts.append(f"--lora-rank {request.adjust.lora_rank}")
    parts += _settings(request, sizes)
    parts += [f"--no-{stage}" for stage in ("transfer", "adjust") if stage not in sizes]
    return " ".join(parts)


def _jobs(model: str, plan: ModePlan, request: Request) -> tuple[str, ...]:
    settings = {
        "data.max_train_tokens": request.tokens,
        "data.sequence_length": request.sequence_length,
        "transfer.epochs": f"{request.epochs:g}",
        "transfer.batch_size": request.batch_size,
        "transfer.micro_batch_size": plan.micro_batch_size,
    }
    flags = " ".join([*(f"--set {field}={value}" for field, value in settings.items()), *_settings(request, ())])
    return (
        f"lolcats blocks prepare {shlex.quote(model)} --data DATA --block-layers {plan.block_layers} {flags} -o jobs/",
        f"lolcats blocks train jobs/ --block I    # for I = 0 ... {plan.blocks - 1}, each on a GPU of its own",
    )


def _settings(request: Request, stages: Collection[str]) -> list[str]:
    """Options for what the plan was told about attention and the given stages."""
    wanted = ("attention", *stages)
    return [f"--set {shlex.quote(text)}" for text in request.settings if text.partition(".")[0] in wanted]


def _launcher(gpus: int, request: Request) -> str:
    if gpus == 1:
        return "lolcats"
    if gpus <= request.gpus_per_node:
        return f"torchrun --nproc-per-node {gpus} -m lolcats"
    nodes = -(-gpus // request.gpus_per_node)
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {request.gpus_per_node} --rdzv-backend c10d"
        " --rdzv-endpoint HOST:29500 -m lolcats"
    )


def _data(model: str, request: Request) -> list[str]:
    return [
        shlex.quote(model),
        "--data DATA",
        f"--max-tokens {request.tokens}",
        f"--epochs {request.epochs:g}",
        f"--sequence-length {request.sequence_length}",
        f"--batch-size {request.batch_size}",
    ]

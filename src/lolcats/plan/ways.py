"""Every way of training, with its memory, time and disk; and which of them to take, as a command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lolcats.config import AdjustSection
from lolcats.errors import UserError
from lolcats.parallel.blockwise.layers import divide, merge
from lolcats.plan import costs
from lolcats.plan.costs import Memory, Step
from lolcats.plan.gpus import GB, Gpu, flop_s
from lolcats.plan.shape import ModelShape

CHECKPOINTING, OFFLOAD, FOUR_BIT = "gradient checkpointing", "cpu offload", "4-bit"
REPLICATED = "replicated weights"
MODES = {
    "joint": "stage 1 on one GPU",
    "sharded": "stage 1, batches divided among GPUs, weights sharded with FSDP2 or replicated",
    "streaming": "stage 1, one block of layers after the other on one GPU",
    "jobs": "stage 1, independent jobs over hidden states computed before",
    "pipelined": "stage 1, blocks of layers on each GPU, hidden states sent on",
    "lora": "stage 2 on one GPU",
    "lora-sharded": "stage 2, as sharded",
}
BLOCK_MODES = ("streaming", "jobs", "pipelined")
# Modes of stage 1 and stage 2 that one `lolcats linearize` runs one after the other.
TOGETHER = {
    ("joint", "lora"),
    ("streaming", "lora"),
    ("sharded", "lora-sharded"),
    ("pipelined", "lora-sharded"),
    ("jobs", "lora"),
    ("jobs", "lora-sharded"),
}
# Options that hold for both stages of a run.
SHARED_FLAGS = {
    REPLICATED: "--set parallel.shard=off",
    OFFLOAD: "--set parallel.cpu_offload=true",
    FOUR_BIT: "--set model.load_in_4bit=true",
}
GPU_COUNTS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WEIGHT = 2  # bytes of a frozen parameter


@dataclass(frozen=True)
class Request:
    """Machines and training.

    Attributes:
        tokens: of one epoch, the same for both stages.
        batch_size: sequences of an optimizer update, over all GPUs.
        micro_batch_size: sequences of a forward pass on one GPU; None: the most that fit.
        adjust: what stage 2 trains and compares with; its batches, epochs and checkpointing are not read.
        settings: `section.key=value` of attention and stage 2 that differ from the defaults, for the command.
        block_layers: linearized layers of a block; None: the plan chooses.
        memory_gb, disk_gb: of a GPU, and free for hidden states (None: as much as it takes); 10^9 bytes.
        disk_gb_s: at which hidden states and weights are read and written.
        network_gb_s: that a GPU receives from other machines.
    """

    gpu: Gpu
    gpus: int = 1
    tokens: int = 20_000_000
    epochs: float = 1.0
    sequence_length: int = 1024
    batch_size: int = 8
    micro_batch_size: int | None = None
    adjust: AdjustSection = field(default_factory=AdjustSection)
    settings: tuple[str, ...] = ()
    block_layers: int | None = None
    memory_gb: float = 0.0
    disk_gb: float | None = None
    disk_gb_s: float = 2.0
    gpus_per_node: int = 8
    network_gb_s: float = 50.0

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise UserError(
                f"--batch-size {self.batch_size} is not a multiple of --micro-batch-size {self.micro_batch_size};"
                " choose a divisor"
            )
        if self.tokens < self.sequence_length:
            raise UserError(
                f"--tokens {self.tokens} is less than one sequence of {self.sequence_length} (--sequence-length)"
            )

    @property
    def memory_bytes(self) -> float:
        return (self.memory_gb or self.gpu.memory_gb) * GB

    @property
    def trained_tokens(self) -> float:
        return self.tokens * self.epochs

    def micro_batches(self, ranks: int) -> list[int]:
        """Sizes to try, largest first, with which every rank has work in every update."""
        sizes = [self.micro_batch_size] if self.micro_batch_size else range(self.batch_size, 0, -1)
        return [size for size in sizes if self.batch_size % (size * ranks) == 0]


@dataclass(frozen=True)
class Way:
    """One way of training one stage.

    Attributes:
        stage: "transfer" or "adjust".
        mode: of `MODES`.
        options: what is switched on, such as "gradient checkpointing".
        trained: parameters that learn.
        flops: of the whole stage.
        disk: bytes of hidden states at the worst moment.
        host: bytes of weights in host memory.
        missing: why it cannot be done; None if it can.
    """

    stage: str
    mode: str
    options: tuple[str, ...]
    gpus: int
    micro_batch_size: int
    memory: Memory
    trained: int
    flops: float
    seconds: float
    block_layers: int | None = None
    blocks: int = 1
    disk: float = 0.0
    host: float = 0.0
    missing: str | None = None

    @property
    def name(self) -> str:
        return ", ".join([self.mode, *self.options])

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"hours": self.hours, "peak": self.memory.peak}


@dataclass(frozen=True)
class Recommendation:
    """Commands to run in this order (most often one), and what they carry out."""

    commands: tuple[str, ...]
    ways: tuple[Way, ...]

    @property
    def hours(self) -> float:
        return sum(way.hours for way in self.ways)


def all_ways(shape: ModelShape, request: Request) -> list[Way]:
    """Each mode with its options, as far as the number of GPUs allows, with the best micro-batch and blocks.

    Raises:
        UserError: the request has larger blocks than the model has layers.
    """
    layers = len(shape.linear_layers)
    if request.block_layers is not None and request.block_layers > layers:
        raise UserError(f"--block-layers {request.block_layers}: the model has {layers} layers to linearize")
    choices: dict[str, list[tuple[str, ...]]] = {
        "joint": [(), (FOUR_BIT,)],
        "sharded": [(REPLICATED,), (), (OFFLOAD,)],
        "streaming": [()],
        "jobs": [()],
        "pipelined": [()],
        "lora": [(), (CHECKPOINTING,), (CHECKPOINTING, FOUR_BIT)],
        "lora-sharded": [(REPLICATED,), (), (CHECKPOINTING,), (CHECKPOINTING, OFFLOAD)],
    }
    if request.gpus == 1:
        choices = {mode: choices[mode] for mode in ("joint", "streaming", "jobs", "lora")}
    return [best_way(shape, request, mode, options) for mode, tried in choices.items() for options in tried]


def best_way(shape: ModelShape, request: Request, mode: str, options: tuple[str, ...] = ()) -> Way:
    """The fastest that fits, among equals the one with the least disk, then with the largest blocks; with each block
    size the largest micro-batch that fits. If nothing fits, the smallest, with what is missing."""
    ranks = request.gpus if mode.endswith("sharded") else 1
    sizes = request.micro_batches(ranks)
    if not sizes:
        size = request.micro_batch_size or 1
        reason = (
            f"a batch of {request.batch_size} sequences does not divide into micro-batches of {size} on {ranks} GPUs;"
            f" use --batch-size {ranks * size}"
        )
        return replace(_way(shape, request, mode, options, size, None), missing=reason)
    blocks: list[int | None] = [None]
    if mode in BLOCK_MODES:
        blocks = [request.block_layers] if request.block_layers else [*_block_sizes(len(shape.linear_layers))]
    found = []
    for block_layers in blocks:
        ways = (_way(shape, request, mode, options, size, block_layers) for size in sizes)
        for way in ways:
            if way.missing is None:
                break
        found.append(way)
    fitting = [way for way in found if way.missing is None]
    if fitting:
        return min(fitting, key=lambda way: (round(way.seconds), way.disk, -(way.block_layers or 0)))
    return min(found, key=lambda way: (way.memory.peak > request.memory_bytes, way.disk, way.memory.peak))


def _way(
    shape: ModelShape, request: Request, mode: str, options: tuple[str, ...], size: int, block_layers: int | None
) -> Way:
    """One mode with the given micro-batch size and blocks."""
    of = _stage_2 if mode.startswith("lora") else _stage_1
    way = of(shape, request, mode, options, Step(size, request.sequence_length), block_layers)
    if mode.endswith("sharded"):
        way = _over_gpus(way, shape, request)
    if FOUR_BIT in options:
        way = replace(way, memory=costs.four_bit_memory(way.memory, shape, Step(1, 1)))
    if way.missing is None and way.memory.peak > request.memory_bytes:
        machines = f"each of {way.gpus} GPUs" if way.gpus > 1 else "a GPU"
        peak, given = way.memory.peak / GB, request.memory_bytes / GB
        return replace(way, missing=f"needs {peak:.0f} GB on {machines} with {given:g} GB")
    if way.missing is None and request.disk_gb is not None and way.disk > request.disk_gb * GB:
        return replace(way, missing=f"needs {way.disk / GB:.0f} GB of disk, has {request.disk_gb:.0f} GB")
    return way


def _stage_1(
    shape: ModelShape, request: Request, mode: str, options: tuple[str, ...], step: Step, block_layers: int | None
) -> Way:
    """Attention transfer; each block's hidden states take 2 T d bytes (arXiv:2410.10254)."""
    length = step.length
    in_blocks = mode in BLOCK_MODES
    layer_blocks = divide(list(shape.linear_layers), block_layers)
    blocks, missing = len(layer_blocks), None
    if mode == "pipelined" and blocks >= request.gpus:
        layer_blocks = merge(layer_blocks, request.gpus)
    elif mode == "pipelined":
        enough = max(1, len(shape.linear_layers) // request.gpus)
        missing = f"{blocks} blocks are not enough for {request.gpus} GPUs; use --block-layers {enough}"
    parts = [shape.layers[part.begin : part.end] for part in layer_blocks]
    if in_blocks:
        beside = [shape.embedding if order == 0 else 0 for order in range(len(parts))]
        held = [
            costs.transfer_memory(shape, part, step, beside=extra) for part, extra in zip(parts, beside, strict=True)
        ]
        memory = max(held, key=lambda found: found.peak)
    else:
        memory = costs.transfer_memory(shape, shape.layers, step, beside=shape.outside)
    flops = [request.trained_tokens * costs.transfer_flops(part, length, shape.mean_window) for part in parts]
    rate = flop_s(request.gpu, "transfer", shape.hidden)
    way = Way(
        stage="transfer",
        mode=mode,
        options=options,
        gpus=request.gpus if mode in ("jobs", "pipelined") else 1,
        micro_batch_size=step.sequences,
        memory=memory,
        trained=shape.feature_parameters,
        flops=sum(flops),
        seconds=sum(flops) / rate,
        block_layers=block_layers,
        blocks=blocks,
        missing=missing,
    )
    boundaries, disk_bytes_s = len(parts) - 1, request.disk_gb_s * GB
    states = costs.hidden_state_bytes(request.tokens, length, shape.hidden)
    weights = shape.parameters * WEIGHT
    if mode == "pipelined":
        in_transit = replace(memory, buffers=memory.buffers + 2 * step.row(shape.hidden))
        return replace(way, memory=in_transit, seconds=max(flops) / rate)
    if mode == "streaming":
        moved = boundaries * states * (1 + request.epochs) + weights
        return replace(way, seconds=way.seconds + moved / disk_bytes_s, disk=min(2, boundaries) * states)
    if mode == "jobs":
        prepare = request.tokens * sum(costs.frozen_flops(part, length) for part in parts[:-1])
        rounds = -(-len(parts) // request.gpus)
        moved = boundaries * states * (2 + request.epochs) + 2 * weights  # prepared: written, read; then trained
        seconds = prepare / flop_s(request.gpu, "frozen", shape.hidden) + rounds * max(flops) / rate
        return replace(way, flops=way.flops + prepare, seconds=seconds + moved / disk_bytes_s, disk=boundaries * states)
    return way


def _stage_2(
    shape: ModelShape, request: Request, mode: str, options: tuple[str, ...], step: Step, _: int | None
) -> Way:
    config = request.adjust.model_copy(update={"gradient_checkpointing": CHECKPOINTING in options})
    student = request.trained_tokens * costs.adjust_flops(shape, step.length, config)
    teacher = request.trained_tokens * costs.frozen_flops(shape.layers, step.length) if config.distill_factor else 0.0
    adjust, frozen = (flop_s(request.gpu, stage, shape.hidden) for stage in ("adjust", "frozen"))
    return Way(
        stage="adjust",
        mode=mode,
        options=options,
        gpus=1,
        micro_batch_size=step.sequences,
        memory=costs.adjust_memory(shape, step, config),
        trained=shape.lora_parameters(config.lora_rank) + config.train_feature_maps * shape.feature_parameters,
        flops=student + teacher,
        seconds=student / adjust + teacher / frozen,
    )


def _over_gpus(way: Way, shape: ModelShape, request: Request) -> Way:
    """The same data-parallel, weights sharded unless replicated.

    A micro-step takes as long as its products and the weights' way to the GPU together, of which measured runs hide
    little behind each other. What is trained is small, and so are its gradients' sums.
    """
    gpus, offload = request.gpus, OFFLOAD in way.options
    step = Step(way.micro_batch_size, request.sequence_length, graphs=False)
    memory = replace(way.memory, optimizer=way.memory.optimizer * 3 / 4)  # without a captured micro-step's gradients
    moving = 0.0
    if REPLICATED not in way.options:
        memory = costs.sharded_memory(memory, shape, step, gpus, offload=offload)
        passes = 1 if way.stage == "transfer" else 3 if request.adjust.distill_factor else 2
        steps = request.trained_tokens / (step.tokens * gpus)
        gathered = steps * passes * sum(layer.parameters for layer in shape.layers) * WEIGHT
        link = request.gpu.link_gb_s if gpus <= request.gpus_per_node else request.network_gb_s
        moving = gathered * (1 - 1 / gpus) / (link * GB)
        if offload:
            moving = max(moving, gathered / gpus / (request.gpu.host_gb_s * GB))
    host = shape.parameters * WEIGHT if offload else 0.0
    return replace(way, gpus=gpus, memory=memory, seconds=way.seconds / gpus + moving, host=host)


def _block_sizes(layers: int) -> list[int]:
    """One size for every number of blocks, the most even one."""
    return sorted({-(-layers // blocks) for blocks in range(1, layers + 1)})


def recommend(model: str, ways: Iterable[Way], request: Request) -> Recommendation | None:
    """The fastest way through both stages; one stage alone if the other does not fit; None if nothing fits."""
    possible = [way for way in ways if way.missing is None]
    first = [way for way in possible if way.stage == "transfer"]
    second = [way for way in possible if way.stage == "adjust"]
    chosen = [(one, two) for one in first for two in second if _go_together(one, two)]
    candidates: list[tuple[Way, ...]] = [*chosen] or [(way,) for way in first or second]
    if not candidates:
        return None
    best = min(candidates, key=lambda ways: (sum(way.hours for way in ways), sum(len(way.options) for way in ways)))
    return Recommendation(_commands(model, best, request), best)


def enough_gpus(shape: ModelShape, request: Request, stage: str) -> str | None:
    """Options with which a stage that does not fit would, with sharded weights; None if it never does."""
    mode, options = ("sharded", ()) if stage == "transfer" else ("lora-sharded", (CHECKPOINTING,))
    for gpus in (count for count in GPU_COUNTS if count >= request.gpus):
        batch_size = -(-request.batch_size // gpus) * gpus
        wider = replace(request, gpus=gpus, batch_size=batch_size, micro_batch_size=1)
        if best_way(shape, wider, mode, options).missing is None:
            return f"--gpus {gpus} --batch-size {batch_size}"
    return None


def _go_together(one: Way, two: Way) -> bool:
    same = all((option in one.options) == (option in two.options) for option in SHARED_FLAGS)
    return (one.mode, two.mode) in TOGETHER and (same or one.mode == "jobs")


def _commands(model: str, ways: tuple[Way, ...], request: Request) -> tuple[str, ...]:
    if ways[0].mode != "jobs":
        return (_linearize(model, ways, request),)
    settings = {
        "data.max_train_tokens": request.tokens,
        "data.sequence_length": request.sequence_length,
        "transfer.epochs": f"{request.epochs:g}",
        "transfer.batch_size": request.batch_size,
        "transfer.micro_batch_size": ways[0].micro_batch_size,
    }
    flags = " ".join([*(f"--set {name}={value}" for name, value in settings.items()), *_settings(request, set())])
    block_layers = f"--block-layers {ways[0].block_layers}"
    return (
        f"lolcats blocks prepare {shlex.quote(model)} --data DATA {block_layers} {flags} -o jobs/",
        f"lolcats blocks train jobs/ --block I    # for I = 0 ... {ways[0].blocks - 1}, each on a GPU of its own",
        _linearize(model, ways, request) if len(ways) > 1 else "lolcats blocks assemble jobs/ -o out/",
    )


def _linearize(model: str, ways: tuple[Way, ...], request: Request) -> str:
    sizes = {way.stage: way.micro_batch_size for way in ways}
    options = {option for way in ways for option in way.options}
    parts = [
        _launcher(ways[-1].gpus, request),
        f"linearize {shlex.quote(model)} --data DATA --max-tokens {request.tokens} --epochs {request.epochs:g}",
        f"--sequence-length {request.sequence_length} --batch-size {request.batch_size} -o out/",
    ]
    if len(set(sizes.values())) == 1:
        parts.append(f"--micro-batch-size {ways[0].micro_batch_size}")
    else:
        parts += [f"--set {stage}.micro_batch_size={size}" for stage, size in sizes.items()]
    if ways[0].block_layers is not None:
        parts.append(f"--block-layers {ways[0].block_layers} --block-mode {ways[0].mode}")
    if ways[0].mode == "jobs":
        parts.append("--job-folder jobs/")
    parts += [flag for option, flag in SHARED_FLAGS.items() if option in options]
    if not options & {REPLICATED, OFFLOAD} and any(way.mode.endswith("sharded") for way in ways):
        parts.append("--set parallel.shard=on")
    if CHECKPOINTING in options:
        parts.append("--set adjust.gradient_checkpointing=true")
    if "adjust" in sizes:
        parts.append(f"--lora-rank {request.adjust.lora_rank}")
    parts += _settings(request, set(sizes))
    parts += [f"--no-{stage}" for stage in ("transfer", "adjust") if stage not in sizes]
    return " ".join(parts)


def _settings(request: Request, stages: set[str]) -> list[str]:
    """Options for what the plan was told about attention and the given stages."""
    wanted = {"attention"} | stages
    return [f"--set {shlex.quote(text)}" for text in request.settings if text.partition(".")[0] in wanted]


def _launcher(gpus: int, request: Request) -> str:
    if gpus == 1:
        return "lolcats"
    if gpus <= request.gpus_per_node:
        return f"torchrun --nproc-per-node {gpus} -m lolcats"
    return (
        f"torchrun --nnodes {-(-gpus // request.gpus_per_node)} --nproc-per-node {request.gpus_per_node}"
        " --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m lolcats"
    )

"""Every way of training, with its memory, time and disk; and which of them to take, as a command."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from lolcats.config import AdjustSection, GatesSection
from lolcats.errors import UserError
from lolcats.parallel.blockwise.layers import divide
from lolcats.plan import costs
from lolcats.plan.costs import WEIGHT, Memory, Step
from lolcats.plan.gpus import GB, Gpu, flop_s
from lolcats.plan.shape import ModelShape

CHECKPOINTING, OFFLOAD, FOUR_BIT = "gradient checkpointing", "cpu offload", "4-bit"
REPLICATED = "replicated weights"
STAGE_1: dict[str, list[tuple[str, ...]]] = {
    "joint": [(), (FOUR_BIT,)],  # on one GPU
    "sharded": [(REPLICATED,), (), (OFFLOAD,)],  # batches divided among GPUs, weights with FSDP2
    "streaming": [()],  # one block of layers after the other on one GPU
    "jobs": [()],  # independent jobs over hidden states computed before
}
"""Mode -> the sets of options that it is tried with."""
STAGE_2: dict[str, list[tuple[str, ...]]] = {
    "lora": [(), (CHECKPOINTING,), (CHECKPOINTING, FOUR_BIT)],
    "lora-sharded": [(REPLICATED,), (), (CHECKPOINTING,), (CHECKPOINTING, OFFLOAD)],
}
GATES = {
    "gates": STAGE_2["lora"],
    "gates-sharded": STAGE_2["lora-sharded"],
}
"""The choice of exact heads, which holds the whole model as stage 2 does."""
MODES = STAGE_1 | GATES | STAGE_2
STAGES = {"transfer": "stage 1", "gates": "gates", "adjust": "stage 2"}
"""In their order, as they are called."""
FLAGS = {
    REPLICATED: "--set parallel.shard=off",
    OFFLOAD: "--set parallel.cpu_offload=true",
    FOUR_BIT: "--set model.load_in_4bit=true",
}
GPUS_PER_NODE = 8
NETWORK_GB_S = 50.0  # that a GPU receives from other machines: 400 Gbit/s each


@dataclass(frozen=True)
class Request:
    """Machines and training.

    Attributes:
        tokens: of one epoch, the same for both stages.
        batch_size: sequences of an optimizer update, over all GPUs.
        micro_batch_size: sequences of a forward pass on one GPU; None: the most that fit.
        adjust: what stage 2 trains and compares with; its batches, epochs and checkpointing are not read.
        gates: the texts of the choice of exact heads and their number.
        settings: `section.key=value` of attention, gates and stage 2 that were asked for, for the command.
        block_layers: linearized layers of a block; None: the plan chooses.
        memory_gb, disk_gb: of a GPU, and free for hidden states (None: as much as it takes); 10^9 bytes.
        disk_gb_s: at which hidden states and weights are read and written.
    """

    gpu: Gpu
    gpus: int = 1
    tokens: int = 20_000_000
    epochs: float = 1.0
    sequence_length: int = 1024
    batch_size: int = 8
    micro_batch_size: int | None = None
    adjust: AdjustSection = field(default_factory=AdjustSection)
    gates: GatesSection = field(default_factory=GatesSection)
    settings: tuple[str, ...] = ()
    block_layers: int | None = None
    memory_gb: float = 0.0
    disk_gb: float | None = None
    disk_gb_s: float = 2.0

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

    @property
    def gate_tokens(self) -> float:
        return (self.gates.max_steps or 0) * self.gates.batch_size * self.gates.sequence_length


@dataclass(frozen=True)
class Way:
    """One way of training one stage.

    Attributes:
        stage: of `STAGES`.
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
    micro_batch_size: int
    memory: Memory
    trained: int
    flops: float
    seconds: float
    gpus: int = 1
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


def all_ways(shape: ModelShape, request: Request) -> list[Way]:
    """Each mode with its options, as far as the number of GPUs allows, with the best micro-batch and blocks.

    Raises:
        UserError: the request has larger blocks than the model has layers.
    """
    layers = len(shape.linear_layers)
    if request.block_layers is not None and request.block_layers > layers:
        raise UserError(f"--block-layers {request.block_layers}: the model has {layers} layers to linearize")
    modes = ("joint", "streaming", "jobs", "gates", "lora") if request.gpus == 1 else tuple(MODES)
    modes = tuple(mode for mode in modes if shape.chosen or mode not in GATES)
    return [best_way(shape, request, mode, options) for mode in modes for options in MODES[mode]]


def best_way(shape: ModelShape, request: Request, mode: str, options: tuple[str, ...] = ()) -> Way:
    """The fastest that fits, among equals the one with the least disk, then with the largest blocks; with each block
    size the largest micro-batch that fits. If nothing fits, the smallest, with what is missing."""
    ranks = request.gpus if mode.endswith("sharded") else 1
    wanted, batch, option = request.micro_batch_size, request.batch_size, "--batch-size "
    if mode in GATES:
        wanted, batch, option = None, request.gates.batch_size, "--set gates.batch_size="
    sizes = [size for size in ([wanted] if wanted else range(batch, 0, -1)) if batch % (size * ranks) == 0]
    if not sizes:
        size = wanted or 1
        reason = (
            f"a batch of {batch} sequences does not divide into micro-batches of {size} on {ranks} GPUs;"
            f" use {option}{ranks * size}"
        )
        return replace(_way(shape, request, mode, options, size, None), missing=reason)
    blocks: list[int | None] = [None]
    if mode in ("streaming", "jobs"):
        layers = len(shape.linear_layers)  # one size for every number of blocks, the most even one
        even = sorted({-(-layers // blocks) for blocks in range(1, layers + 1)})
        blocks = [request.block_layers] if request.block_layers else [*even]
    found = []
    for block_layers in blocks:
        for size in sizes:
            way = _way(shape, request, mode, options, size, block_layers)
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
    step = Step(size, request.gates.sequence_length if mode in GATES else request.sequence_length)
    if mode in STAGE_2:
        way = _stage_2(shape.after_gates, request, mode, options, step)
    elif mode in GATES:
        way = _gates(shape, request, mode, options, step)
    else:
        way = _stage_1(shape, request, mode, options, step, block_layers)
    if mode.endswith("sharded"):
        way = _over_gpus(way, shape, request, step)
    if FOUR_BIT in options:
        way = replace(way, memory=costs.four_bit_memory(way.memory, shape))
    peak, given, missing = way.memory.peak, request.memory_bytes, way.missing
    if peak > given:
        machines = f"each of {way.gpus} GPUs" if way.gpus > 1 else "a GPU"
        missing = missing or f"needs {peak / GB:.0f} GB on {machines} with {given / GB:g} GB"
    if request.disk_gb is not None and way.disk > request.disk_gb * GB:
        missing = missing or f"needs {way.disk / GB:.0f} GB of disk, has {request.disk_gb:.0f} GB"
    return replace(way, missing=missing)


def _stage_1(
    shape: ModelShape, request: Request, mode: str, options: tuple[str, ...], step: Step, block_layers: int | None
) -> Way:
    """Attention transfer; each block's hidden states take 2 T d bytes (arXiv:2410.10254)."""
    layer_blocks = divide(list(shape.linear_layers), block_layers)
    blocks = len(layer_blocks)
    parts = [shape.layers[part.begin : part.end] for part in layer_blocks]
    if mode in ("joint", "sharded"):
        memory = costs.transfer_memory(shape, shape.layers, step, beside=shape.outside)
    else:
        memory = max(
            (
                costs.transfer_memory(shape, part, step, beside=0 if order else shape.embedding)
                for order, part in enumerate(parts)
            ),
            key=lambda held: held.peak,
        )
    flops = [request.trained_tokens * costs.transfer_flops(part, step.length, shape.mean_window) for part in parts]
    rate, disk_bytes_s = flop_s(request.gpu, "transfer", shape.hidden), request.disk_gb_s * GB
    way = Way(
        stage="transfer",
        mode=mode,
        options=options,
        gpus=request.gpus if mode == "jobs" else 1,
        micro_batch_size=step.sequences,
        memory=memory,
        trained=shape.feature_parameters,
        flops=sum(flops),
        seconds=sum(flops) / rate,
        block_layers=block_layers,
        blocks=blocks,
    )
    boundaries, weights = len(parts) - 1, shape.parameters * WEIGHT
    states = costs.hidden_state_bytes(request.tokens, step.length, shape.hidden)
    if mode == "streaming":
        moved = boundaries * states * (1 + request.epochs) + weights
        return replace(way, seconds=way.seconds + moved / disk_bytes_s, disk=min(2, boundaries) * states)
    if mode == "jobs":
        prepare = request.tokens * sum(costs.frozen_flops(part, step.length) for part in parts[:-1])
        rounds = -(-len(parts) // request.gpus)
        moved = boundaries * states * (2 + request.epochs) + 2 * weights  # prepared: written, read; then trained
        seconds = prepare / flop_s(request.gpu, "frozen", shape.hidden) + rounds * max(flops) / rate
        return replace(way, flops=way.flops + prepare, seconds=seconds + moved / disk_bytes_s, disk=boundaries * states)
    return way


def _stage_2(shape: ModelShape, request: Request, mode: str, options: tuple[str, ...], step: Step) -> Way:
    """Low-rank adjusting; with distillation the teacher's forward pass comes on top."""
    config = request.adjust.model_copy(update={"gradient_checkpointing": CHECKPOINTING in options})
    student = request.trained_tokens * costs.adjust_flops(shape, step.length, config)
    teacher = request.trained_tokens * costs.frozen_flops(shape.layers, step.length) if config.distill_factor else 0.0
    adjust, frozen = (flop_s(request.gpu, stage, shape.hidden) for stage in ("adjust", "frozen"))
    return Way(
        stage="adjust",
        mode=mode,
        options=options,
        micro_batch_size=step.sequences,
        memory=costs.adjust_memory(shape, step, config),
        trained=shape.lora_parameters(config.lora_rank) + config.train_feature_maps * shape.feature_parameters,
        flops=student + teacher,
        seconds=student / adjust + teacher / frozen,
    )


def _gates(shape: ModelShape, request: Request, mode: str, options: tuple[str, ...], step: Step) -> Way:
    """The choice of exact heads."""
    checkpointing = {"gradient_checkpointing": CHECKPOINTING in options}
    student = request.gate_tokens * costs.gates_flops(shape, step.length, **checkpointing)
    teacher = request.gate_tokens * costs.frozen_flops(shape.layers, step.length)
    adjust, frozen = (flop_s(request.gpu, stage, shape.hidden) for stage in ("adjust", "frozen"))
    return Way(
        stage="gates",
        mode=mode,
        options=options,
        micro_batch_size=step.sequences,
        memory=costs.gates_memory(shape, step, **checkpointing),
        trained=sum(layer.kv_heads for layer in shape.layers if layer.linear),
        flops=student + teacher,
        seconds=student / adjust + teacher / frozen,
    )


def _over_gpus(way: Way, shape: ModelShape, request: Request, step: Step) -> Way:
    """The same data-parallel, weights sharded unless replicated.

    A micro-step takes as long as its products and the weights' way to the GPU together, of which measured runs hide
    little behind each other. What is trained is small, and so are its gradients' sums.
    """
    gpus, offload = request.gpus, OFFLOAD in way.options
    memory = replace(way.memory, optimizer=way.memory.optimizer * 3 / 4)  # without a captured micro-step's gradients
    moving = 0.0
    if REPLICATED not in way.options:
        memory = costs.sharded_memory(memory, shape, gpus, offload=offload)
        passes = {"transfer": 1, "gates": 3, "adjust": 3 if request.adjust.distill_factor else 2}[way.stage]
        tokens = request.gate_tokens if way.stage == "gates" else request.trained_tokens
        steps = tokens / (step.tokens * gpus)
        gathered = steps * passes * sum(layer.parameters for layer in shape.layers) * WEIGHT
        link = request.gpu.link_gb_s if gpus <= GPUS_PER_NODE else NETWORK_GB_S
        moving = gathered * (1 - 1 / gpus) / (link * GB)
        if offload:
            moving = max(moving, gathered / gpus / (request.gpu.host_gb_s * GB))
    host = shape.parameters * WEIGHT if offload else 0.0
    return replace(way, gpus=gpus, memory=memory, seconds=way.seconds / gpus + moving, host=host)


def recommend(ways: Iterable[Way]) -> tuple[Way, ...]:
    """The fastest way through all stages; the first or the last alone if others do not fit; () if nothing fits.

    If gates do not fit, stage 1 runs block by block, where scores choose the exact heads.
    """
    ways = list(ways)
    possible = {stage: [way for way in ways if way.stage == stage and way.missing is None] for stage in STAGES}
    needed = {stage: found for stage, found in possible.items() if stage in {way.stage for way in ways}}
    candidates = [chosen for chosen in itertools.product(*needed.values()) if _one_run(chosen)]
    if not candidates and needed.keys() >= {"transfer", "gates"}:
        del needed["gates"]
        needed["transfer"] = possible["transfer"] = [
            way for way in possible["transfer"] if way.block_layers is not None
        ]
        candidates = [chosen for chosen in itertools.product(*needed.values()) if _one_run(chosen)]
    if not candidates:
        candidates = [(way,) for way in possible["transfer"] or possible["adjust"]]

    def cost(chosen: tuple[Way, ...]) -> tuple[float, int]:
        return sum(way.hours for way in chosen), sum(len(way.options) for way in chosen)

    return min(candidates, key=cost, default=())


def _one_run(ways: Sequence[Way]) -> bool:
    """Whether one `lolcats linearize` can do all of them."""
    if ways[0].block_layers is not None and any(way.stage == "gates" for way in ways):
        return False
    joined = [way for way in ways if way.mode != "jobs"]
    return len({(way.gpus, frozenset(way.options) - {CHECKPOINTING}) for way in joined}) <= 1


def commands(model: str, ways: Sequence[Way], request: Request) -> list[str]:
    """What to run, in this order, for the recommended ways."""
    if not ways:
        return []
    if ways[0].mode != "jobs":
        return [_linearize(model, ways, request)]
    settings = {
        "data.max_train_tokens": request.tokens,
        "data.sequence_length": request.sequence_length,
        "transfer.epochs": f"{request.epochs:g}",
        "transfer.batch_size": request.batch_size,
        "transfer.micro_batch_size": ways[0].micro_batch_size,
    }
    flags = " ".join([*(f"--set {name}={value}" for name, value in settings.items()), *_settings(request, "attention")])
    block_layers = f"--block-layers {ways[0].block_layers}"
    return [
        f"lolcats blocks prepare {shlex.quote(model)} --data DATA {block_layers} {flags} -o jobs/",
        f"lolcats blocks train jobs/ --block I    # for I = 0 ... {ways[0].blocks - 1}, each on a GPU of its own",
        _linearize(model, ways, request) if len(ways) > 1 else "lolcats blocks assemble jobs/ -o out/",
    ]


def _linearize(model: str, ways: Sequence[Way], request: Request) -> str:
    first, last = ways[0], ways[-1]
    stages = [way.stage for way in ways]
    options = {option for way in ways for option in way.options}
    launcher = "lolcats"
    if last.gpus > GPUS_PER_NODE:
        nodes = f"--nnodes {-(-last.gpus // GPUS_PER_NODE)} --nproc-per-node {GPUS_PER_NODE}"
        launcher = f"torchrun {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m lolcats"
    elif last.gpus > 1:
        launcher = f"torchrun --nproc-per-node {last.gpus} -m lolcats"
    parts = [
        f"{launcher} linearize {shlex.quote(model)} --data DATA --max-tokens {request.tokens}",
        f"--epochs {request.epochs:g} --sequence-length {request.sequence_length} --batch-size {request.batch_size}",
        f"-o out/ --micro-batch-size {first.micro_batch_size}",
    ]
    for way in ways[1:]:
        if way.stage == "gates" or way.micro_batch_size != first.micro_batch_size:
            parts.append(f"--set {way.stage}.micro_batch_size={way.micro_batch_size}")
    if first.block_layers is not None:
        parts.append(f"--block-layers {first.block_layers} --block-mode {first.mode}")
    if first.mode == "jobs":
        parts.append("--job-folder jobs/")
    parts += [flag for option, flag in FLAGS.items() if option in options]
    parts += [f"--set {way.stage}.gradient_checkpointing=true" for way in ways if CHECKPOINTING in way.options]
    if not options & {REPLICATED, OFFLOAD} and any(way.mode.endswith("sharded") for way in ways):
        parts.append("--set parallel.shard=on")
    parts += _settings(request, "attention", *stages)
    parts += [f"--no-{stage}" for stage in ("transfer", "adjust") if stage not in stages]
    return " ".join(parts)


def _settings(request: Request, *sections: str) -> list[str]:
    """Options for what the plan was told about these sections."""
    return [f"--set {shlex.quote(text)}" for text in request.settings if text.partition(".")[0] in sections]

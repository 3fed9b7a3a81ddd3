"""What a plan is asked for, and what it answers for one way of training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lolcats.config import AdjustSection
from lolcats.errors import UserError
from lolcats.plan.gpus import GB, Gpu
from lolcats.plan.memory import Memory
from lolcats.plan.throughput import Rate


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

    @property
    def link_bytes_s(self) -> float:
        """That a GPU receives from the others while weights are gathered."""
        return (self.gpu.link_gb_s if self.gpus <= self.gpus_per_node else self.network_gb_s) * GB

    def micro_batches(self, ranks: int = 1) -> list[int]:
        """Sizes to try, largest first, with which every rank has work in every update."""
        sizes = [self.micro_batch_size] if self.micro_batch_size else range(self.batch_size, 0, -1)
        return [size for size in sizes if self.batch_size % (size * ranks) == 0]


@dataclass(frozen=True)
class ModePlan:
    """One way of training one stage.

    Attributes:
        stage: "transfer" or "adjust".
        mode: name, as in `MODES`.
        options: what is switched on, such as "gradient checkpointing".
        trained: parameters that learn.
        flops: of the whole stage.
        evaluation: bytes of validation beside `memory`, which a captured micro-step does not give back.
        disk: bytes of hidden states at the worst moment.
        host: bytes of weights in host memory.
        limit: what most of the hours are made of: "compute", "link", "host" or "disk".
        missing: why it cannot be done, and what to do; None if it can.
    """

    stage: str
    mode: str
    gpus: int
    micro_batch_size: int
    memory: Memory
    trained: int
    flops: float
    seconds: float
    rate: Rate
    options: tuple[str, ...] = ()
    block_layers: int | None = None
    blocks: int = 1
    evaluation: float = 0.0
    disk: float = 0.0
    host: float = 0.0
    limit: str = "compute"
    missing: str | None = None

    @property
    def needed(self) -> float:
        """Bytes of GPU memory."""
        return self.memory.total + self.evaluation

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes as numbers of bytes."""
        derived = {"needed": self.needed, "hours": self.hours, "memory_total": self.memory.total}
        return asdict(self) | derived

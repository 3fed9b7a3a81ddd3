"""The two stages, and how several processes share them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lolcats.config.section import Section, Switch


class OptimSection(Section):
    """Optimisation shared by both stages."""

    enabled: bool = True
    lr: float = Field(1e-2, gt=0)
    epochs: float = Field(2, gt=0)
    """Passes over the training sequences (`max_steps` wins if set)."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer updates."""
    batch_size: int = Field(8, ge=1)
    """Sequences per optimizer update."""
    micro_batch_size: int = Field(8, ge=1)
    """Sequences per forward pass; gradients accumulate to `batch_size`."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float | None = Field(1.0, gt=0)
    """Gradient norm clipping threshold; null: none."""
    schedule: Literal["plateau", "constant", "cosine"] = "plateau"
    """plateau: multiply the rate by `plateau_factor` after `plateau_patience` evaluations without gain; cosine:
    half a cosine down to `min_lr`."""
    plateau_factor: float = Field(0.1, gt=0, lt=1)
    plateau_patience: int = Field(10, ge=0)
    min_lr: float = Field(1e-5, ge=0)
    eval_every: int = Field(100, ge=1)
    """Updates between evaluations on the validation split."""
    checkpoint_every: int = Field(100, ge=1)
    """Updates between checkpoints from which `--resume` continues."""
    early_stopping: int | None = Field(None, ge=1)
    """Stop after this many evaluations without gain; null: never."""
    fused_kernels: Switch = "auto"
    """auto: on a GPU, liger-kernel's norms, activations and rotary embedding where it is installed and knows
    the model, and LoRA in the model's type; off: the model's own. They differ by rounding."""
    cuda_graphs: Switch = "auto"
    """auto: on one GPU, micro-steps run as CUDA graphs where the model and the data allow it; off: never. A
    graph keeps the memory of a micro-step to itself; results are the same."""

    def total_steps(self, steps_per_epoch: int) -> int:
        """Updates of the whole stage."""
        return self.max_steps or max(1, round(self.epochs * steps_per_epoch))

    @model_validator(mode="after")
    def _divisible(self) -> OptimSection:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size};"
                " choose a divisor"
            )
        return self


class TransferSection(OptimSection):
    """Stage 1, attention transfer: train feature maps and window factors to match softmax attention."""

    mse_factor: float = Field(1000.0, ge=0)
    """Factor of the mean squared error between attention outputs."""
    xent_factor: float = Field(0.0, ge=0)
    """Factor of the cross-entropy between attention weights (quadratic memory)."""
    select_by: Literal["loss", "perplexity"] = "loss"
    """Which validation number chooses the best weights: the stage's own loss, or (as in the paper) the
    perplexity of the linearized model, which costs a forward pass with the language-model head."""
    block_layers: int | None = Field(None, ge=1)
    """Linearized layers per block with its own clipping and schedule; null: all layers jointly."""
    block_mode: Literal["joint", "streaming", "pipelined", "jobs"] = "joint"
    """joint: the whole model in memory; streaming: one block of layers at a time, read from the checkpoint when
    its turn comes; pipelined: every process (torchrun) holds its blocks and sends hidden states to the next one;
    jobs: take the blocks that `lolcats blocks train` trained in `job_folder`."""
    job_folder: str | None = None
    """Folder that `lolcats blocks prepare` made."""
    activation_cache: Literal["disk", "memory"] = "disk"
    """Where hidden states between blocks wait: in files, from which a preempted run resumes, or in CPU memory."""
    activation_cache_folder: str | None = None
    """Folder for these files; null: inside the run's folder."""
    activation_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of cached hidden states; auto: that of the model, which loses nothing."""

    @model_validator(mode="after")
    def _some_loss(self) -> TransferSection:
        if self.enabled and self.mse_factor == 0 and self.xent_factor == 0:
            raise ValueError("mse_factor and xent_factor are both 0: stage 1 would have no loss")
        return self

    @model_validator(mode="after")
    def _blocks_fit(self) -> TransferSection:
        if self.block_mode == "joint":
            return self
        if self.block_mode == "jobs" and self.job_folder is None:
            raise ValueError("block_mode=jobs needs job_folder, the folder with the trained blocks")
        if self.block_mode == "streaming" and self.block_layers is None:
            raise ValueError("block_mode=streaming needs block_layers, the number of layers in memory at a time")
        if self.block_mode == "pipelined" and self.early_stopping is not None:
            raise ValueError(
                "early_stopping would stop one process while others need its hidden states; leave it out with"
                " block_mode=pipelined"
            )
        return self


class AdjustSection(OptimSection):
    """Stage 2, low-rank adjusting: next-token training of the linearized model."""

    lr: float = Field(1e-4, gt=0)
    method: Literal["lora", "full"] = "lora"
    """lora: PEFT adapters on the projections; full: train all weights."""
    lora_rank: int = Field(8, ge=1)
    lora_alpha: float = Field(16, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    lora_targets: list[Literal["q", "k", "v", "o"]] = ["q", "k", "v", "o"]
    """Projections with adapters; fused projections (qkv) count as q, k and v."""
    train_feature_maps: bool = False
    """Train feature maps and window factors too (the "no attention transfer" baseline)."""
    feature_lr: float | None = Field(None, gt=0)
    """Learning rate of feature maps and window factors, scheduled as `lr` is; null: `lr`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    distill_factor: float = Field(0.0, ge=0, le=1)
    """Share of KL(softmax teacher || student) in the loss; the rest is next-token cross-entropy."""
    distill_temperature: float = Field(1.0, gt=0)
    softmax_control: bool = False
    """Keep softmax attention everywhere: the LoRA control run of the same budget."""

    @model_validator(mode="after")
    def _has_a_teacher(self) -> AdjustSection:
        if self.method == "full" and self.distill_factor:
            raise ValueError(
                f"distill_factor={self.distill_factor:g} needs the softmax teacher, whose weights method=full trains;"
                " use method=lora, or distill_factor=0"
            )
        return self

    @model_validator(mode="after")
    def _rates_are_used(self) -> AdjustSection:
        if self.feature_lr is not None and not self.train_feature_maps:
            raise ValueError(
                f"feature_lr={self.feature_lr:g} is the rate of feature maps, which are not trained; set"
                " train_feature_maps=true, or leave it out"
            )
        return self


def _on_or_off(value: Any) -> Any:
    """YAML reads bare `on` and `off` as truth values."""
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


class ParallelSection(Section):
    """Several processes, one per GPU, started by torchrun; a run of one process ignores it."""

    shard: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = "auto"
    """on: the frozen weights are sharded over the processes (FSDP2); off: they are replicated, which is faster where
    they fit; auto: sharded if one copy would take more than a quarter of a GPU's memory. Either way each process
    takes its share of every batch."""
    cpu_offload: bool = False
    """Keep each process's shard of the frozen weights in CPU memory: less GPU memory, slower."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that a process waits for the others before it gives up."""

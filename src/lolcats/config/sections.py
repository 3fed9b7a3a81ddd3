"""The sections of a configuration, but for the attention's (`attention.py`): settings, their types and meanings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SHORTEST_TEXT = 512  # tokens that a table to look something up in needs


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, fields carry their documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def _yaml_switch(on: str) -> BeforeValidator:
    """YAML reads bare `on` and `off` as truth values."""
    return BeforeValidator(lambda value: (on if value else "off") if isinstance(value, bool) else value)


Switch = Annotated[Literal["auto", "off"], _yaml_switch("auto")]
"""auto: where it is possible; off: never."""


class ModelSection(Section):
    """The pretrained model to linearize."""

    path: str | None = None
    """Hugging Face hub id or local folder, of weights that are not quantised."""
    revision: str | None = None
    """Branch, tag or commit of the hub repository."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the frozen weights and activations; auto: bfloat16 on a GPU, float32 on a CPU.
    Feature maps, window factors and states are always float32."""
    device: str = "auto"
    """auto (first GPU, else CPU), cpu, cuda, cuda:1, ..."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (NF4, bitsandbytes): a quarter of the memory, a little less exact. The
    exported model has the checkpoint's own weights, with the trained parts."""


class DataSource(Section):
    """One data set of the mixture."""

    path: str
    """Hub id, or local .json, .jsonl, .csv, .tsv, .parquet or .txt file (also .gz), folder, glob, or folder of
    `save_to_disk`; "demo": shipped text; "self": what the model to linearize writes itself (4000 samples unless
    `max_rows` says otherwise); "retrieval": generated texts of `sequence_length` tokens that ask for what stands in
    them (2000 unless `max_rows` says otherwise); "passkey": the same with the paper's filler and a number (10000); in
    `transfer.data` and `adjust.data`, "data.sources": those of `data`, which share this one's weight."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set, or of a local folder whose files' or folders' names say their splits, as `datasets`
    reads them (train.jsonl, test/...)."""
    weight: float = Field(1.0, gt=0.0)
    """Share of this source in the mixture, relative to the other sources' weights. With one source, or
    equal weights everywhere and no repeated source, every source is used in full."""
    repeat: bool = False
    """Begin again where it ends, so that the other sources alone decide how large the mixture is."""
    answers: Literal["given", "teacher"] = "given"
    """teacher: the model to linearize answers the rows' prompts itself; their own answers are not read."""
    format: Literal["auto", "alpaca", "chat", "prompt", "text"] = "auto"
    """chat: messages or conversations (with tools), or records of the next two formats, through the tokenizer's chat
    template; alpaca: instruction, input, output, or question, answer, in Alpaca's prompt; prompt: prompt and completion
    as they are; text: plain documents; auto: from the columns, row by row."""
    text_column: str | None = None
    """Column of plain documents; null: "text"."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only."""
    validation_rows: int | None = Field(None, ge=1)
    """As `data.validation_rows`, for this source; null: as there. A stage's own data hold out at least as many rows as
    `data` of the same path."""
    loss_on: Literal["answer", "all"] | None = None
    """As `data.loss_on`, for this source; null: as there."""
    seed: int = Field(0, ge=0)
    """Of generated texts."""
    haystack: str = "demo"
    """retrieval: the text around, a data source of plain text."""

    @property
    def is_written(self) -> bool:
        """Whether the model to linearize writes its rows."""
        return self.path == "self" or self.answers == "teacher"

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> DataSource:
        idle = {"seed": self.path not in ("retrieval", "passkey"), "haystack": self.path != "retrieval"}
        for name, is_idle in (idle | dict.fromkeys(("format", "text_column"), self.is_written)).items():
            if is_idle and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={getattr(self, name)} changes nothing of {self.path!r}: leave it out")
        return self


class DataSection(Section):
    """Training data of both stages, where a stage has none of its own, and the validation data of the whole run."""

    sources: list[DataSource] = []
    sequence_length: int = Field(1024, ge=2)
    """Tokens of a packed training sequence."""
    loss_on: Literal["answer", "all"] = "answer"
    """answer: labels on the answers of instruction records only; plain text always has labels on all."""
    position_offset: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """Training sequences start at different positions up to this one (0: all at 0), so that feature maps, which see
    rotated queries and keys, learn to do without the position. At most the model's positions less `sequence_length`;
    auto: seven times `sequence_length`, as far as the model's positions go."""
    position_jumps: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """At so many random places of a training sequence positions jump ahead, `position_offset` being the most that they
    gain in all: distances of long texts in short sequences (PoSE, arXiv:2309.10400). Layers with a native sliding
    window teach no distances beyond it; auto: 1 without these, else 0."""
    position_share: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the training sequences that `position_offset` and `position_jumps` move; the others stay where short
    texts are read."""
    begin_token: bool = False
    """Begin every packed sequence with the tokenizer's begin token. Models whose attention rests on it (Gemma)
    need that: without, they are poor teachers."""
    validation_rows: int = Field(200, ge=1)
    """The first rows of each source are the validation split (before shuffling, never trained on)."""
    validation_sequences: int | None = Field(None, ge=1)
    """At most this many packed validation sequences."""
    max_train_tokens: int | None = Field(None, ge=1)
    """Stop packing after this many training tokens."""

    def held_out(self, source: DataSource) -> int:
        """How many rows of a source, its first ones, are its validation split."""
        return source.validation_rows or self.validation_rows

    @property
    def written_sources(self) -> list[DataSource]:
        """Those whose rows the model to linearize writes."""
        return [source for source in self.sources if source.is_written]

    @model_validator(mode="after")
    def _jumps_have_room(self) -> DataSection:
        if self.position_jumps in (0, "auto"):
            return self
        if not self.position_offset:
            raise ValueError("position_jumps needs a position_offset, what positions may gain in all; or set it to 0")
        if int(self.position_jumps) >= self.sequence_length:
            raise ValueError(f"position_jumps={self.position_jumps} in {self.sequence_length} tokens: expected fewer")
        return self


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

    data: DataSection | None = None
    """What differs from `data` in this stage: other sources, longer sequences (as far as the model's positions go);
    null: nothing."""
    mse_factor: float = Field(1000.0, ge=0)
    """Factor of the mean squared error between attention outputs."""
    xent_factor: float = Field(0.0, ge=0)
    """Factor of the cross-entropy between attention weights (quadratic memory)."""
    select_by: Literal["loss", "perplexity"] = "loss"
    """Which validation number chooses the best weights: the stage's own loss, or (as in the paper) the
    perplexity of the linearized model, which costs a forward pass with the language-model head."""
    block_layers: int | None = Field(None, ge=1)
    """Linearized layers per block with its own clipping and schedule; null: all layers jointly."""
    block_mode: Literal["joint", "streaming"] = "joint"
    """joint: the whole model in memory; streaming: one block of layers at a time, read from the checkpoint when
    its turn comes."""

    @model_validator(mode="after")
    def _goes_together(self) -> TransferSection:
        if self.enabled and self.mse_factor == 0 and self.xent_factor == 0:
            raise ValueError("mse_factor and xent_factor are both 0, so that stage 1 has no loss: set one of them")
        if self.block_mode == "streaming" and self.block_layers is None:
            raise ValueError("block_mode=streaming needs block_layers, the number of layers in memory at a time")
        return self


class GatesSection(OptimSection):
    """The choice of exact heads, between the two stages, where `attention.exact` is a budget: one gate in [0, 1] for
    each KV head mixes its softmax and its hybrid attention. (After DuoAttention, arXiv:2410.10819.)"""

    lr: float = Field(0.03, gt=0)
    max_steps: int | None = Field(300, ge=1)
    batch_size: int = Field(4, ge=1)
    micro_batch_size: int = Field(4, ge=1)
    clip_norm: float | None = None
    schedule: Literal["plateau", "constant", "cosine"] = "cosine"
    min_lr: float = Field(0.0, ge=0)
    penalty: float = Field(1.0, ge=0)
    """Factor of the mean gate, which is added to the divergence from the softmax model (nats a token)."""
    sequence_length: int = Field(2048, ge=SHORTEST_TEXT)
    """Tokens of a text, four fifths of which ask for something that stands in them; fewer if the model has fewer
    positions."""
    haystack: str = "demo"
    """Text around what is asked for: a data source of plain text, or the shipped textbooks. With fewer than four times
    `sequence_length` tokens, heads next to the budget's border are not compared in texts of so many."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    @model_validator(mode="after")
    def _without_epochs(self) -> GatesSection:
        if not self.enabled:
            raise ValueError("enabled: gates are learned where attention.exact is a budget (12%); change that")
        if self.epochs != OptimSection().epochs:
            raise ValueError(f"epochs={self.epochs:g}: texts are generated, as many as max_steps ask for; set that")
        return self

    def fitting_length(self, positions: int) -> int:
        """Tokens of a text for a model of so many positions."""
        return min(self.sequence_length, max(positions, SHORTEST_TEXT))


class AdjustSection(OptimSection):
    """Stage 2, low-rank adjusting: next-token training of the linearized model."""

    data: DataSection | None = None
    """What differs from `data` in this stage; null: nothing."""
    lr: float = Field(1e-4, gt=0)
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
    """Share of KL(softmax teacher || student) in the loss; the rest is next-token cross-entropy. With it the loss
    chooses the best weights, else the perplexity."""
    softmax_control: bool = False
    """Keep softmax attention everywhere: the LoRA control run of the same budget."""

    @model_validator(mode="after")
    def _goes_together(self) -> AdjustSection:
        if self.softmax_control and self.distill_factor:
            raise ValueError(
                f"softmax_control=true with distill_factor={self.distill_factor:g}: the control is its own teacher and"
                " would learn nothing; set distill_factor=0"
            )
        if self.feature_lr is not None and not self.train_feature_maps:
            raise ValueError(f"feature_lr={self.feature_lr:g} with train_feature_maps=false: change that, or omit it")
        return self


class ParallelSection(Section):
    """Several processes, one per GPU, started by torchrun; a run of one process ignores it."""

    shard: Annotated[Literal["auto", "on", "off"], _yaml_switch("on")] = "auto"
    """on: the frozen weights are sharded over the processes (FSDP2); off: they are replicated, which is faster where
    they fit; auto: sharded if one copy would take more than a quarter of a GPU's memory. Either way each process
    takes its share of every batch."""


class OutputSection(Section):
    """What a run writes."""

    track: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Send losses, rates and validation metrics to a tracker, which is installed beside lolcats; TensorBoard reads
    them in `run/tracking`. A run of it per stage; stages trained block by block are not tracked."""

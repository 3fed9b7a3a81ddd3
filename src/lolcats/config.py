"""The configuration of a linearization run: typed, validated, printed, saved.

One `LinearizeConfig` describes a run completely. It is read from a recipe (YAML), changed by command
line flags and `--set key=value` overrides, validated once, and saved beside the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from typing import Any
from typing import Literal

import yaml
from pydantic import BaseModel
from pydantic import BeforeValidator
from pydantic import ConfigDict
from pydantic import Field
from pydantic import ValidationError
from pydantic import model_validator

from lolcats.errors import UserError


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, fields carry their documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def _switch(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return {False: "off", True: "auto"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "off"], BeforeValidator(_switch)]
"""auto: where it is possible; off: never."""


class ModelSection(Section):
    """The pretrained model to linearize."""

    path: str | None = None
    """Hugging Face hub id or local folder."""
    revision: str | None = None
    """Branch, tag or commit of the hub repository."""
    gguf_file: str | None = None
    """Name of a GGUF file in `path`; its weights are dequantised while loading."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the frozen weights and activations; auto: bfloat16 on a GPU, float32 on a CPU.
    Feature maps, window factors and states are always float32."""
    device: str = "auto"
    """auto (first GPU, else CPU), cpu, cuda, cuda:1, ..."""
    trust_remote_code: bool = False
    """Run Python code shipped with the checkpoint."""


class AttentionSection(Section):
    """What replaces softmax attention (equation hybrid_linear_swa of arXiv:2410.10254)."""

    window: Literal["terraced", "sliding"] = "terraced"
    """terraced: blocks counted from the sequence start; sliding: the last `window_size` tokens."""
    window_size: int = Field(64, ge=0)
    """Tokens in the sliding window, or in one block of the terraced window; 0: no window."""
    window_blocks: int = Field(2, ge=1)
    """Terraced: softmax over the current and the previous `window_blocks - 1` blocks."""
    sinks: int = Field(0, ge=0)
    """The first `sinks` tokens stay in the softmax part of every query."""
    feature_map: str | None = "hedgehog"
    """hedgehog, t2r, elu, exp, or null: no linear term (window attention alone)."""
    feature_dim: int | None = Field(None, ge=1)
    """Columns of the feature map's weight; null: so that there are head_dim features."""
    feature_init: Literal["identity", "zeros", "kaiming"] = "identity"
    """Initial feature-map weights: truncated identity, zeros, or Kaiming uniform."""
    share_state: Literal["kv_head", "query_head"] = "kv_head"
    """One key feature map and state per KV head, or per query head (the paper's models)."""
    window_gamma: float = Field(0.1, gt=0.0, lt=1.0)
    """Initial gamma of every head, the factor of the window's terms."""
    keep_softmax: list[int] = []
    """Layers (from 0) that keep softmax attention and a growing KV cache."""
    sliding_layers: Literal["auto", "keep", "linearize"] = "auto"
    """Layers with a native sliding window, which already need constant memory. keep: leave them;
    linearize: replace them like the others; auto: keep them in models that mix both kinds."""


class DataSource(Section):
    """One data set of the mixture."""

    path: str
    """Hub id, or local .json, .jsonl(.gz), .parquet, .txt file, folder or glob; "demo": shipped text;
    "passkey": generated retrieval texts of `sequence_length` tokens (10000 unless `max_rows` says otherwise)."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    weight: float = Field(1.0, gt=0.0)
    """Share of this source in the mixture, relative to the other sources' weights. With one source, or
    equal weights everywhere, every source is used in full."""
    format: Literal["auto", "alpaca", "chat", "text", "multiple_choice"] = "auto"
    """alpaca: instruction, input, output; chat: messages, or alpaca records through the tokenizer's chat
    template; text: plain documents; multiple_choice: question, choices, answerKey (CommonsenseQA, ARC), five
    to a sample in MMLU's format; auto: from the columns."""
    text_column: str | None = None
    """Column of plain documents; null: "text"."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only."""
    seed: int = Field(0, ge=0)
    """Of generated texts ("passkey") and of the examples in multiple_choice samples."""


class DataSection(Section):
    """Training and validation data of both stages."""

    sources: list[DataSource] = []
    sequence_length: int = Field(1024, ge=2)
    """Tokens of a packed training sequence."""
    loss_on: Literal["answer", "all"] = "answer"
    """answer: labels on the answers of instruction records only; plain text always has labels on all."""
    reset_documents: bool = False
    """Keep packed documents apart: positions restart and attention does not cross their borders."""
    validation_rows: int = Field(200, ge=1)
    """The first rows of each source are the validation split (before shuffling, never trained on)."""
    validation_sequences: int | None = Field(None, ge=1)
    """At most this many packed validation sequences."""
    max_train_tokens: int | None = Field(None, ge=1)
    """Stop packing after this many training tokens."""
    top_esl: int | None = Field(None, ge=1)
    """Train on this many sequences only: those with the longest effective sequence length under the model's
    softmax attention (arXiv:2410.10254, appendix "Sample Lengths"); null: on all."""


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
    """plateau: multiply the rate by `plateau_factor` after `plateau_patience` evaluations without gain."""
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
    """Layers per block with its own clipping and schedule; null: all layers jointly."""

    @model_validator(mode="after")
    def _some_loss(self) -> TransferSection:
        if self.enabled and self.mse_factor == 0 and self.xent_factor == 0:
            raise ValueError("mse_factor and xent_factor are both 0: stage 1 would have no loss")
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
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    distill_factor: float = Field(0.0, ge=0, le=1)
    """Share of KL(softmax teacher || student) in the loss; the rest is next-token cross-entropy."""
    distill_temperature: float = Field(1.0, gt=0)
    softmax_control: bool = False
    """Keep softmax attention everywhere: the LoRA control run of the same budget."""


class OutputSection(Section):
    """What a run writes."""

    merge_lora: bool = True
    """Merge the adapters into the weights; false: also keep them as a PEFT adapter in `adapter/`."""
    dtype: Literal["same", "bfloat16", "float16", "float32"] = "same"
    """Type of the exported weights; same: the dtype that was trained with."""
    tensorboard: bool = False
    """Write TensorBoard logs into `run/tensorboard`."""


class LinearizeConfig(Section):
    """Everything that decides the result of `lolcats linearize`."""

    recipe: str | None = None
    """Name of the recipe this started from."""
    model: ModelSection = ModelSection()
    attention: AttentionSection = AttentionSection()
    data: DataSection = DataSection()
    transfer: TransferSection = TransferSection()
    adjust: AdjustSection = AdjustSection()
    output: OutputSection = OutputSection()
    seed: int = 0

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LinearizeConfig:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(_explain(error)) from error

    @classmethod
    def from_yaml(cls, path: str | Path) -> LinearizeConfig:
        return cls.from_dict(read_yaml(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping; errors name the file."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of sections, got {type(values).__name__}")
    return values


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        both_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_sections else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`"transfer.lr=0.005"` -> `{"transfer": {"lr": 0.005}}`; the value is YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise UserError(f"--set {text}: expected section.key=value, for example transfer.lr=0.005")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--set {text}: the value is not valid YAML: {error}") from error
    for key in reversed(path.strip().split(".")):
        nested = {key: nested}
    return nested


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        got = item["input"]
        shown = "" if isinstance(got, dict | Section) else f" (got {got!r})"
        lines.append(f"  {where}: {item['msg']}{shown}")
    return "the configuration is not valid:\n" + "\n".join(lines)

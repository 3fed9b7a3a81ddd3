"""The parts of a model that cost memory and FLOPs, counted on a copy without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from lolcats.config import AdjustSection, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.fused import FAMILIES
from lolcats.modeling.loading import load_config
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.probing import LayerRecord, probe
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.plan.known_shapes import SHAPES
from lolcats.training.lora import projection_names

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer; every number of elements is of one layer.

    Attributes:
        parameters: of the pretrained model.
        matrices: of these, those in linear layers, which every token is multiplied with.
        feature_parameters: feature maps and window factors; 0 in a layer that keeps softmax attention.
        adapted: (inputs, outputs) of the projections that get LoRA.
        heads, kv_heads, state_heads, head_dim, columns, features: of attention; the last three of its linear term.
        sliding_window: tokens of the layer's native window, or None.
        mlp_inputs: columns that the MLP's first projections give (gate and up together).
        mlp_outputs: columns of the product that its last projection takes.
    """

    parameters: int
    matrices: int
    feature_parameters: int
    adapted: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    state_heads: int
    columns: int
    features: int
    sliding_window: int | None
    mlp_inputs: int
    mlp_outputs: int

    @property
    def linear(self) -> bool:
        return self.feature_parameters > 0

    def lora_parameters(self, rank: int) -> int:
        return sum(rank * (inputs + outputs) for inputs, outputs in self.adapted)


@dataclass(frozen=True)
class ModelShape:
    """A model in numbers.

    Attributes:
        embedding, head: elements; the head has none of its own if they are tied (`head` is 0).
        other: parameters outside layers, embedding and head.
        fused: whether liger-kernel knows the family, so that norms and activations keep less for the backward pass.
        mean_window: keys that a query of the hybrid attention sees through softmax, on average.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[LayerShape, ...]
    embedding: int
    head: int
    other: int
    fused: bool
    mean_window: float

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) + self.outside

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(self.layers) if layer.linear)

    @property
    def first_adapted(self) -> int:
        """Index of the first layer with LoRA; those before it have no backward pass."""
        return min(index for index, layer in enumerate(self.layers) if layer.adapted)

    @property
    def outside(self) -> int:
        """Parameters outside the decoder layers."""
        return self.embedding + self.head + self.other

    def lora_parameters(self, rank: int) -> int:
        return sum(layer.lora_parameters(rank) for layer in self.layers)

    @property
    def feature_parameters(self) -> int:
        return sum(layer.feature_parameters for layer in self.layers)


def model_shape(model: str, attention: AttentionConfig, adjust: AdjustSection) -> ModelShape:
    """Count the model at a hub id or folder, or a shape of `lolcats bench`.

    Raises:
        UserError: no such model, or one that cannot be linearized or planned for.
    """
    return shape_of(find_config(model), attention, adjust, name=model)


def find_config(model: str) -> PreTrainedConfig:
    """Configuration of a named shape, a folder or a hub repository; only its config.json is read."""
    if model in SHAPES and not Path(model).is_dir():
        return LlamaConfig(**SHAPES[model])
    try:
        return load_config(ModelSection(path=model))
    except UserError as error:
        raise UserError(f"{error}. Or name a shape: {', '.join(SHAPES)}") from error


def shape_of(
    config: PreTrainedConfig, attention: AttentionConfig, adjust: AdjustSection, *, name: str = ""
) -> ModelShape:
    """Count the model that `config` describes, built without weights and converted as in a real run."""
    _refuse_experts(config)
    config = copy.deepcopy(config)  # the model writes its type and attention into it
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    parameters = dict(base.named_parameters())
    records = _probe(base)
    model = convert(base, attention)
    added = {index: sum(p.numel() for p in module.parameters()) for index, module in model.linear_layers()}
    adapted = _adapted(model, adjust.lora_targets)
    layers = tuple(
        _layer(record, base, parameters, added.get(record.index, 0), adapted, attention) for record in records
    )
    total = sum(parameter.numel() for parameter in parameters.values())
    embedding_parameters = embedding.weight.numel()
    head_parameters = 0 if head.weight is embedding.weight else head.weight.numel()
    return ModelShape(
        name=name or config.model_type,
        hidden=embedding.weight.shape[1],
        vocabulary=config.vocab_size,
        layers=layers,
        embedding=embedding_parameters,
        head=head_parameters,
        other=total - embedding_parameters - head_parameters - sum(layer.parameters for layer in layers),
        fused=config.model_type in FAMILIES,
        mean_window=_mean_window(attention),
    )


def _layer(
    record: LayerRecord,
    base: PreTrainedModel,
    parameters: Mapping[str, nn.Parameter],
    feature_parameters: int,
    adapted: Mapping[str, tuple[int, int]],
    attention: AttentionConfig,
) -> LayerShape:
    """Count the layer of an attention module.

    Args:
        parameters: of the base model.
        adapted: path -> (inputs, outputs) of the projections that get LoRA.
    """
    path = record.module.rpartition(".")[0]
    own = {name: parameter for name, parameter in parameters.items() if name.startswith(path + ".")}
    linears = {
        f"{path}.{name}": module
        for name, module in base.get_submodule(path).named_modules()
        if isinstance(module, nn.Linear)
    }
    for name, parameter in own.items():
        if parameter.dim() > 1 and name.removesuffix(".weight") not in linears:
            raise UserError(
                f"{type(base).__name__} ({base.config.model_type}) cannot be planned: {name} is a matrix outside a"
                " linear layer, whose FLOPs are not known"
            )
    inside = {name for name in linears if name.startswith(record.module + ".")}
    mlp = [module for name, module in linears.items() if name not in inside]
    matrices = sum(module.weight.numel() for module in linears.values())
    columns = features = 0
    if feature_parameters and attention.feature_map is not None:
        phi = get_feature_map(attention.feature_map)
        columns = attention.feature_dim or phi.default_dim(record.head_dim)
        features = columns * phi.multiple
    return LayerShape(
        parameters=sum(parameter.numel() for parameter in own.values()),
        matrices=matrices,
        feature_parameters=feature_parameters,
        adapted=tuple(size for name, size in adapted.items() if name in inside),
        heads=record.num_heads,
        kv_heads=record.num_kv_heads,
        head_dim=record.head_dim,
        state_heads=record.num_kv_heads if attention.share_state == "kv_head" else record.num_heads,
        columns=columns,
        features=features,
        sliding_window=record.sliding_window,
        mlp_inputs=sum(module.out_features for module in mlp[:-1]),
        mlp_outputs=mlp[-1].in_features if mlp else 0,
    )


def _adapted(model: LolcatsForCausalLM, roles: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Path in the base model -> (inputs, outputs) of the projections with LoRA."""
    sizes = {}
    for name in projection_names(model, roles):
        module: Any = model.get_submodule(name)
        sizes[name.removeprefix("model.")] = (module.in_features, module.out_features)
    return sizes


def _probe(base: PreTrainedModel) -> list[LayerRecord]:
    """The attention modules of a model without weights; where there are none, `convert` says why."""
    try:
        return probe(base)
    except Exception:
        return []


def _mean_window(attention: AttentionConfig) -> float:
    """Keys in a query's window far from the sequence's start, on average over its place in a block."""
    if attention.window == "sliding":
        return float(attention.window_size + attention.sinks)
    return attention.window_size * (attention.window_blocks - 1) + (attention.window_size + 1) / 2 + attention.sinks


def _refuse_experts(config: PreTrainedConfig) -> None:
    found = next((name for name in _EXPERTS if (getattr(config, name, None) or 0) > 1), None)
    if found is not None:
        raise UserError(
            f"{config.model_type} is a mixture of experts ({found}={getattr(config, found)}): what a token costs"
            " depends on its routing, which the plan does not know. Measure with a short run:"
            " lolcats linearize MODEL --max-steps 20"
        )

"""The parts of a model that cost memory and FLOPs, counted on a copy without weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from lolcats.config import AdjustSection, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert, linearized_config
from lolcats.errors import UserError
from lolcats.modeling.cache import recurrent_layers
from lolcats.modeling.cache_size import cache_bytes, heads_in_budget, window_in_budget
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.fused import FAMILIES
from lolcats.modeling.loading import load_config
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
        head_parameters: feature maps and window factors of a linear KV head.
        projections: (inputs, outputs) of those that LoRA adapts where the layer has linear heads.
        adapted: these, or () where it does not.
        heads, kv_heads, state_heads, head_dim, columns, features: of attention; the last three of its linear term.
        exact: KV heads with softmax attention over all keys.
        sliding_window: tokens of the layer's native window, or None.
        mlp_inputs: columns that the MLP's first projections give (gate and up together).
        mlp_outputs: columns of the product that its last projection takes.
    """

    parameters: int
    matrices: int
    head_parameters: int
    projections: tuple[tuple[int, int], ...]
    adapted: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    state_heads: int
    columns: int
    features: int
    exact: int
    sliding_window: int | None
    mlp_inputs: int
    mlp_outputs: int

    @property
    def linear(self) -> bool:
        return self.exact < self.kv_heads

    @property
    def linear_share(self) -> float:
        """Of the heads."""
        return 1 - self.exact / self.kv_heads

    @property
    def feature_parameters(self) -> int:
        return self.head_parameters * (self.kv_heads - self.exact)

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
        config: of the model with linear heads wherever there can be some.
        exact: KV heads that are exact from the start, by layer.
        chosen: those that gates will make so; where, only they know, so the dearest are taken.
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
    config: LolcatsConfig
    exact: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    chosen: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)

    def with_exact(self, exact: Mapping[int, Sequence[int]]) -> ModelShape:
        """With these KV heads exact, by layer, and those of layers that keep softmax attention in any case."""
        layers = []
        for layer, heads in zip(self.layers, self.config.layer_heads, strict=True):
            count = len({*heads.exact, *exact.get(heads.index, ())})
            adapted = layer.projections if count < layer.kv_heads else ()
            layers.append(replace(layer, exact=count, adapted=adapted))
        return replace(self, layers=tuple(layers), exact=exact, chosen={})

    @property
    def after_gates(self) -> ModelShape:
        if not self.chosen:
            return self
        return self.with_exact({i: (*self.exact.get(i, ()), *self.chosen.get(i, ())) for i in range(len(self.layers))})

    @property
    def softmax(self) -> ModelShape:
        """With softmax attention everywhere, and LoRA in the layers that could be linear: the control."""
        layers = tuple(replace(layer, exact=layer.kv_heads) for layer in self.with_exact({}).layers)
        exact = {index: range(layer.kv_heads) for index, layer in enumerate(layers)}
        return replace(self._with_window(None), layers=layers, exact=exact, chosen={})

    def _with_window(self, exact_window: int | None) -> ModelShape:
        config = copy.copy(self.config)
        config.attention = replace(config.attention, exact_window=exact_window)
        return replace(self, config=config)

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of one sequence's cache in bfloat16."""
        return cache_bytes(self.config, tokens, torch.bfloat16, self.exact)

    @property
    def kv_heads(self) -> int:
        return sum(layer.kv_heads for layer in self.layers)

    @property
    def exact_heads(self) -> int:
        return sum(layer.exact for layer in self.layers)

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
        config = load_config(ModelSection(path=model))
    except UserError as error:
        raise UserError(f"{error}. Or name a shape: {', '.join(SHAPES)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"the weights of {model} are quantised: plan for the checkpoint from which they were made")
    return config


def shape_of(
    config: PreTrainedConfig, attention: AttentionConfig, adjust: AdjustSection, *, name: str = ""
) -> ModelShape:
    """Count the model that `config` describes, built without weights and converted as in a real run."""
    experts = next((field for field in _EXPERTS if (getattr(config, field, None) or 0) > 1), None)
    if experts is not None:
        raise UserError(
            f"{config.model_type} is a mixture of experts ({experts}={getattr(config, experts)}): what a token costs"
            " depends on its routing, which the plan does not know. Measure with a short run:"
            " lolcats linearize MODEL --max-steps 20"
        )
    if recurrent := recurrent_layers(config):
        raise UserError(
            f"{config.model_type} has layers without attention ({', '.join(map(str, recurrent))}), whose cost the plan"
            " does not know. Measure with a short run: lolcats linearize MODEL --max-steps 20"
        )
    config = copy.deepcopy(config)  # the model writes its type and attention into it
    with torch.device("meta"):
        base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    parameters = dict(base.named_parameters())
    records: list[LayerRecord] = []
    with suppress(Exception):  # `linearized_config` says what is wrong
        records = probe(base)
    wanted = linearized_config(base, attention)
    model = convert(base, replace(attention, exact=(), exact_window=attention.exact_tokens))
    added = {
        index: sum(p.numel() for p in module.parameters()) // module.num_kv_heads
        for index, module in model.linear_layers()
    }
    adapted = {path.removeprefix("model.") for path in projection_names(model, adjust.lora_targets)}
    layers = []
    for record in records:
        path = record.module.rpartition(".")[0] + "."
        linears = {
            name: module
            for name, module in base.named_modules()
            if isinstance(module, nn.Linear) and name.startswith(path)
        }
        own = {name: parameter for name, parameter in parameters.items() if name.startswith(path)}
        for field, parameter in own.items():
            if parameter.dim() > 1 and field.removesuffix(".weight") not in linears:
                raise UserError(
                    f"{type(base).__name__} ({config.model_type}) cannot be planned: {field} is a matrix outside a"
                    " linear layer, whose FLOPs are not known"
                )
        mlp = [module for name, module in linears.items() if not name.startswith(record.module + ".")]
        phi = get_feature_map(attention.feature_map) if record.index in added and attention.feature_map else None
        columns = (attention.feature_dim or phi.default_dim(record.head_dim)) if phi else 0
        layers.append(
            LayerShape(
                parameters=sum(parameter.numel() for parameter in own.values()),
                matrices=sum(module.weight.numel() for module in linears.values()),
                head_parameters=added.get(record.index, 0),
                projections=tuple(
                    (module.in_features, module.out_features) for name, module in linears.items() if name in adapted
                ),
                adapted=(),
                heads=record.num_heads,
                kv_heads=record.num_kv_heads,
                head_dim=record.head_dim,
                state_heads=record.num_kv_heads if attention.share_state == "kv_head" else record.num_heads,
                columns=columns,
                features=columns * phi.multiple if phi else 0,
                exact=0 if record.index in added else record.num_kv_heads,
                sliding_window=record.sliding_window,
                mlp_inputs=sum(module.out_features for module in mlp[:-1]),
                mlp_outputs=mlp[-1].in_features if mlp else 0,
            )
        )
    # On average over a query's place in its block, far from the start.
    window = float(attention.window_size)
    if attention.window == "terraced":
        window = window * (attention.window_blocks - 1) + (window + 1) / 2
    head_parameters = 0 if head is embedding else head.numel()
    inside = sum(layer.parameters for layer in layers)
    shape = ModelShape(
        name=name or config.model_type,
        hidden=embedding.shape[1],
        vocabulary=config.vocab_size,
        layers=tuple(layers),
        embedding=embedding.numel(),
        head=head_parameters,
        other=sum(p.numel() for p in parameters.values()) - embedding.numel() - head_parameters - inside,
        fused=config.model_type in FAMILIES,
        mean_window=window + attention.sinks,
        config=model.config,
    )
    chosen = {}
    if (budget := attention.exact_budget) is not None:
        ranked = sorted(
            (layers[layer.index].sliding_window is not None, head, layer.index)
            for layer in wanted.linear_layers
            for head in range(layer.num_kv_heads)
        )
        chosen = heads_in_budget(wanted, budget, torch.bfloat16, [(index, head) for _, head, index in ranked])
    exact = {layer.index: layer.exact for layer in wanted.layer_heads}
    shape = replace(shape.with_exact(exact), chosen=chosen)
    if isinstance(attention.exact_window, str):
        heads = shape.after_gates.exact
        shape = shape._with_window(window_in_budget(shape.config, attention, torch.bfloat16, heads))
    return shape

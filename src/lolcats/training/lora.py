"""LoRA on the attention projections, through PEFT, whatever a family calls them."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from lolcats.config import AdjustSection
from lolcats.errors import UserError
from lolcats.modeling.model import LolcatsForCausalLM

# Names of the projections inside attention modules; fused ones stand for several roles.
_FUSED = ("qkv_proj", "query_key_value", "W_pack", "Wqkv")
_PROJECTIONS = {
    "q": ("q_proj", *_FUSED),
    "k": ("k_proj", *_FUSED),
    "v": ("v_proj", *_FUSED),
    "o": ("o_proj", "dense", "out_proj"),
}


def add_lora(model: LolcatsForCausalLM, config: AdjustSection) -> PeftModel:
    """Wrap `model` with adapters on the linearized layers' projections; everything else is frozen."""
    names = adapted_projections(model, config)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT only divides it by r
        lora_dropout=config.lora_dropout,
        target_modules=names,
        bias="none",
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, lora)
    assert isinstance(wrapped, PeftModel)
    return wrapped


def adapted_projections(model: LolcatsForCausalLM, config: AdjustSection) -> list[str]:
    """Full names of the modules that get adapters: those with the roles of `lora_targets` in all linearized layers."""
    names: set[str] = set()
    for path in [f"model.{layer.module}" for layer in model.config.linear_layers]:
        children = model.get_submodule(path).named_children()
        linears = {name for name, child in children if isinstance(child, nn.Linear)}
        for role in config.lora_targets:
            found = [name for name in _PROJECTIONS[role] if name in linears]
            if not found:
                raise UserError(
                    f"lora_targets: no {role!r} projection in {path}; its linear layers are"
                    f" {', '.join(sorted(linears)) or 'none'}. Change lora_targets"
                )
            names.add(f"{path}.{found[0]}")
    # not the weight's shape: weights in 4 bits are packed
    layers: list[Any] = [model.get_submodule(name) for name in names]
    smallest = min(min(layer.in_features, layer.out_features) for layer in layers)
    if config.lora_rank > smallest:
        raise UserError(
            f"lora_rank={config.lora_rank} is more than the smallest projection's {smallest} rows or columns;"
            f" choose at most {smallest}"
        )
    return sorted(names)

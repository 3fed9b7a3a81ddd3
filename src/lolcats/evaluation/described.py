"""What was evaluated, for reports."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lolcats.modeling.model import LolcatsForCausalLM


def describe(model: Any) -> dict[str, Any]:
    """Type, number of parameters, dtype and, of a linearized model, attention."""
    return {
        "type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        **attention_of(model),
    }


def attention_of(model: Any) -> dict[str, Any]:
    """{"attention": what a linearized model's layers compute, as it was loaded}; {} of other models."""
    return {"attention": asdict(model.config.spec())} if isinstance(model, LolcatsForCausalLM) else {}

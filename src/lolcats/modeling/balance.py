"""Keys whose channels fill the same range, so that 8 bits round them alike.

In some families (Qwen2) a few channels of the keys are a hundred times larger than the others, by their bias. A token's
largest entry decides how finely all of its entries are rounded, so that such channels cost the others their digits.
Dividing a channel of the keys and multiplying that of the queries by the same number moves the range into the queries,
which are never rounded (SmoothAttention, arXiv:2405.04532, there from data). Here the numbers come from the weights
alone, and are powers of two: scores stay what they were, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lolcats.config.attention import LayerHeads
from lolcats.modeling.attention import SOFTMAX
from lolcats.modeling.model import LolcatsForCausalLM

DEVIATIONS = 3.0
"""How many standard deviations of its weighted inputs a channel is taken to reach, beside its bias."""
TOKENS = 16
"""On which the model must compute the same afterwards."""


@torch.no_grad()
def balance_keys(model: LolcatsForCausalLM) -> int:
    """Scale what makes queries and keys, and feature maps against it, in place; adapters of PEFT's, too.

    That are the weights of norms, where queries and keys have some (Qwen3, OLMo 2), else projections.

    Returns:
        How many layers have other weights now. 0 where the model would compute something else, as with Gemma's norms
        (one plus a weight) or other pairs of rotated channels than those half a head apart: its weights are as before.
    """
    found = []
    for layer in model.config.layer_heads:
        attention = model.model.get_submodule(layer.module)
        if (parts := _parts(attention)) is not None:
            before = getattr(model.model.get_submodule(layer.module.rpartition(".")[0]), "input_layernorm", None)
            found.append((layer, attention, parts, _factors(layer, parts[1], before)))
    token_1T = torch.arange(TOKENS, device=model.device)[None] % model.config.text_config.vocab_size
    logits = model(token_1T, use_cache=False, attention_call=SOFTMAX).logits
    for layer, attention, parts, factor_GD in found:
        _scale(layer, attention, parts, factor_GD)
    if torch.equal(model(token_1T, use_cache=False, attention_call=SOFTMAX).logits, logits):
        return len(found)
    for layer, attention, parts, factor_GD in found:
        _scale(layer, attention, parts, 1 / factor_GD)
    return 0


def _parts(attention: Any) -> tuple[Any, Any] | None:
    """The last modules with weights before the rotary embedding, of queries and keys; None: not known, or sharded."""
    kind = "norm" if any("norm" in name for name, _ in attention.named_children()) else "proj"
    parts: Any = getattr(attention, f"q_{kind}", None), getattr(attention, f"k_{kind}", None)
    if None in parts:
        return None
    weights = [x for part in parts for x in part.parameters()]
    whole = all(x.is_floating_point() and not isinstance(x.data, DTensor) for x in weights)
    whole &= kind == "proj" or all(x.dim() == 1 for x in weights)  # Cohere's norms are [heads, D]
    return parts if whole and weights else None


def _factors(layer: LayerHeads, part: nn.Module, before: nn.Module | None) -> Tensor:
    """[G, D], or [1, D] for all heads: powers of two, what keys' channels are divided by; one a rotated pair."""
    linear: Any = getattr(part, "base_layer", part)
    if linear.weight.dim() == 1:
        reach = linear.weight.float().abs()
    else:
        weight = linear.weight.float() if before is None else linear.weight.float() * before.weight.float()
        reach = DEVIATIONS * weight.norm(dim=1) + (0 if linear.bias is None else linear.bias.float().abs())
    reach_GD = reach.view(-1, 2, layer.head_dim // 2).amax(1).repeat(1, 2).clamp_min(torch.finfo(torch.float32).tiny)
    return (reach_GD / reach_GD.median(-1, keepdim=True).values).clamp(2**-8, 2**8).log2().round().exp2()


def _scale(layer: LayerHeads, attention: Any, parts: tuple[Any, Any], factor_GD: Tensor) -> None:
    for part, factor in zip(parts, (factor_GD, 1 / factor_GD), strict=True):
        for name, x in part.named_parameters():
            if "lora_A" not in name:  # its rows are no channels
                factor_HD = factor.repeat_interleave(len(x) // factor.numel(), 0)
                x.mul_(factor_HD.view(-1, *[1] * (x.dim() - 1)).to(x.dtype))
    if layer.is_softmax:
        return
    linear = [head for head in range(layer.num_kv_heads) if head not in layer.exact]
    own_GD = factor_GD.expand(layer.num_kv_heads, -1)[linear]
    for name, x in attention.linear_attention.named_parameters():  # [heads, D, P] each
        if name.endswith(("q_weight", "k_weight")):
            own_SD = own_GD.repeat_interleave(len(x) // len(linear), 0)
            x.mul_((own_SD if name.endswith("k_weight") else 1 / own_SD)[..., None])

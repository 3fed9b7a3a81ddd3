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
from lolcats.modeling.call import SOFTMAX
from lolcats.modeling.model import LolcatsForCausalLM

DEVIATIONS = 3.0
"""How many standard deviations of its weighted inputs a channel is taken to reach, beside its bias."""
TOKENS = 16
"""On which the model must compute the same afterwards."""


@torch.no_grad()
def balance_keys(model: LolcatsForCausalLM) -> int:
    """Scale queries' and keys' projections, and feature maps against them, in place; adapters of PEFT's, too.

    Returns:
        How many layers have other weights now. 0 where the model computes something else then, as with norms of queries
        and keys or with other pairs of rotated channels than those half a head apart: its weights are as before.
    """
    layers = [(layer, model.model.get_submodule(layer.module)) for layer in model.config.layer_heads]
    norms = [
        getattr(model.model.get_submodule(x.module.rpartition(".")[0]), "input_layernorm", None) for x, _ in layers
    ]
    found = [
        (layer, module, _factors(layer, module.k_proj, norm))
        for (layer, module), norm in zip(layers, norms, strict=True)
        if _is_plain(module)
    ]
    token_1T = torch.arange(TOKENS, device=model.device)[None] % model.config.text_config.vocab_size
    before = model(token_1T, use_cache=False, attention_call=SOFTMAX).logits
    for layer, module, factor_GD in found:
        _scale(layer, module, factor_GD)
    if torch.equal(model(token_1T, use_cache=False, attention_call=SOFTMAX).logits, before):
        return len(found)
    for layer, module, factor_GD in found:
        _scale(layer, module, 1 / factor_GD)
    return 0


def _is_plain(attention: Any) -> bool:
    """Whether queries and keys go from projections with whole weights straight to the rotary embedding."""
    if any(getattr(attention, name, None) is None for name in ("q_proj", "k_proj")):
        return False
    weights = [*attention.q_proj.parameters(), *attention.k_proj.parameters()]
    whole = all(x.is_floating_point() and not isinstance(x.data, DTensor) for x in weights)
    return whole and not any("norm" in name for name, _ in attention.named_children())


def _factors(layer: LayerHeads, k_proj: Any, norm: nn.Module | None) -> Tensor:
    """[G, D] powers of two: what each channel of the keys is divided by. Both of a rotated pair have the same."""
    linear = getattr(k_proj, "base_layer", k_proj)
    weight = linear.weight.float() if norm is None else linear.weight.float() * norm.weight.float()
    reach = DEVIATIONS * weight.norm(dim=1) + (0 if linear.bias is None else linear.bias.float().abs())
    reach_GD = reach.view(layer.num_kv_heads, 2, -1).amax(1).repeat(1, 2)
    return (reach_GD / reach_GD.median(-1, keepdim=True).values).clamp_min(2**-8).log2().round().exp2()


def _scale(layer: LayerHeads, attention: Any, factor_GD: Tensor) -> None:
    groups = layer.num_heads // layer.num_kv_heads
    query_HD = factor_GD.repeat_interleave(groups, 0)
    for projection, factor in ((attention.q_proj, query_HD), (attention.k_proj, 1 / factor_GD)):
        for name, x in projection.named_parameters():
            if "lora_A" not in name:  # its rows are no channels
                x.mul_(factor.flatten().view(-1, *[1] * (x.dim() - 1)).to(x.dtype))
    if layer.is_softmax:
        return
    linear = [head for head in range(layer.num_kv_heads) if head not in layer.exact]
    for name, x in attention.linear_attention.named_parameters():  # [heads, D, P] each
        if name.endswith(("q_weight", "k_weight")):
            own_GD = factor_GD[linear].repeat_interleave(len(x) // len(linear), 0)
            x.mul_((own_GD if name.endswith("k_weight") else 1 / own_GD)[..., None])

"""A linearized language model back in the multimodal model that it was taken from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lolcats.errors import UserError
from lolcats.modeling.attention import ATTENTION_NAME, prepare_passes
from lolcats.modeling.cache_hooks import provide_cache_layer
from lolcats.modeling.loading import check_complete
from lolcats.modeling.model import LolcatsForCausalLM, decoder_of, is_linearized


def put_back(whole: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Make the language model of a multimodal model the linearized one in `folder`, in place.

    Softmax layers see images as in the original. Linear layers see the tokens of an image in their order, which the
    original does too, except in Gemma 3, whose image tokens also see those after them. The result is used from memory:
    `save_pretrained` would write a folder that its own class does not read.

    Args:
        whole: as its own class loads it; its type and device count.
        folder: with a `LolcatsForCausalLM` made of this model.

    Returns:
        `whole`.

    Raises:
        UserError: the folder holds another language model, or one is put back already; `whole` is as before.
    """
    settings: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    loaded: Any = LolcatsForCausalLM.from_pretrained(folder, dtype=whole.dtype, **settings)
    model = loaded[0]
    check_complete(loaded[1], folder)
    model.to(whole.device)
    decoder, linearized = decoder_of(whole), model.get_decoder()
    prefix = next(name for name, module in model.model.named_modules() if module is linearized) + "."
    pairs = (decoder, linearized), (whole.get_output_embeddings(), model.get_output_embeddings())
    if is_linearized(whole) or any(_shapes(own) != _shapes(new) for own, new in pairs):
        raise UserError(f"{folder} is not the language model of {type(whole).__name__}, or is in its place already")
    for layer in model.config.layer_heads:
        path = layer.module.removeprefix(prefix)
        attention = decoder.get_submodule(path)
        attention.register_forward_pre_hook(provide_cache_layer, with_kwargs=True)
        attention.attention_config = model.config.attention
        if not layer.is_softmax:
            attention.linear_attention = linearized.get_submodule(path).linear_attention
    for own, new in pairs:
        own.load_state_dict(new.state_dict())
    prepare_passes(decoder)
    for config in (decoder.config, whole.config.get_text_config(decoder=True)):
        config._attn_implementation = ATTENTION_NAME
    return whole


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Of all that is saved but feature maps."""
    return {name: x.shape for name, x in module.state_dict().items() if ".linear_attention." not in name}

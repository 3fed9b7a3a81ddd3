"""Some layers of a model's decoder, run by themselves."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from lolcats.errors import UserError
from lolcats.modeling.attention import ATTENTION_CALL, AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM

HIDDEN = "hidden_states"
"""Key, in a batch, of the hidden states [B, T, hidden] that go into the first layer that runs."""


def decoder_layers(model: LolcatsForCausalLM) -> tuple[str, nn.ModuleList]:
    """The path of the list of decoder layers in the base model, and the list."""
    base: Any = model.model
    attention = model.config.linear_layers[0].module
    path = attention.rsplit(".", 2)[0]
    layers = base.get_submodule(path)
    if not isinstance(layers, nn.ModuleList) or base.get_submodule(path.rpartition(".")[0]) is not model.get_decoder():
        raise UserError(
            f"{type(base).__name__}: {attention} is not in a list of its decoder's layers, which parallel.shard and"
            " training block by block need; set parallel.shard=off and transfer.block_mode=joint"
        )
    return path, layers


class _Done(Exception):
    """Ends a pass after the last layer that is wanted."""


def run_layers(model: LolcatsForCausalLM, layers: range, inputs: dict[str, Tensor], call: AttentionCall) -> Tensor:
    """The hidden states [B, T, hidden] after some layers of the decoder.

    The family's own forward pass makes masks and rotary embeddings as always. Layers before these hand their input
    through, and nothing after them runs.

    Args:
        inputs: keyword arguments of the decoder; for layers that are not the first `HIDDEN` instead of input_ids.
    """
    found, outputs, arguments = decoder_layers(model)[1], [], dict(inputs)
    if HIDDEN in arguments:
        arguments["inputs_embeds"] = arguments.pop(HIDDEN)

    def take(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)
        raise _Done

    def hand_through(*_: Any, **__: Any) -> Tensor:
        return arguments["inputs_embeds"]  # without what the decoder does to its input, a scale say

    hook = found[layers.stop - 1].register_forward_hook(take)
    with ExitStack() as changes, suppress(_Done):
        changes.callback(hook.remove)
        for layer in found[: layers.start]:
            changes.enter_context(patch.object(layer, "forward", hand_through))
        model.get_decoder()(**arguments, use_cache=False, **{ATTENTION_CALL: call})
    if not isinstance(outputs[0], Tensor):
        raise UserError(
            f"{type(found[0]).__name__} cannot be trained block by block: it returns {type(outputs[0]).__name__}"
            " instead of a tensor; use transfer.block_mode=joint"
        )
    return outputs[0]


def embedding_name(model: LolcatsForCausalLM) -> str:
    """Path of the token embedding in the base model."""
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.model.named_modules() if module is embedding)

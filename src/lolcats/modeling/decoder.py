"""Some layers of a model's decoder, run by themselves."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from lolcats.errors import UserError
from lolcats.modeling.call import ATTENTION_CALL, AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM

HIDDEN = "hidden_states"
"""Key, in a batch, of the hidden states [B, T, hidden] that go into a part's first layer."""
LAYER_INPUT = "lolcats_layer_input"
LAYER_OUTPUT = "lolcats_layer_output"


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


def decoder_part(model: LolcatsForCausalLM, begin: int, end: int) -> nn.Module:
    """A decoder with only the layers `begin` to `end` - 1: a second module over the same weights.

    The family's own forward pass makes masks and rotary embeddings as always and calls its layers in order. Layers
    before `begin` keep their places, because a layer's number may decide its kind, and hand their input through.
    What follows the layers (a norm) runs if its weights are loaded. The model does not change, and its hooks run.

    It is called by `run_part`, or like the decoder.
    """
    _, layers = decoder_layers(model)
    decoder = model.get_decoder()
    passed = [_second(layer) for layer in layers[:begin]]
    for layer in passed:
        vars(layer)["forward"] = _hand_through
    last = _second(layers[end - 1])
    last.register_forward_hook(_take_output, with_kwargs=True)
    part = _second(decoder)
    for name, module in decoder.named_children():
        if module is layers:
            part.add_module(name, nn.ModuleList([*passed, *layers[begin : end - 1], last]))
        elif any(parameter.is_meta for parameter in module.parameters()):
            part.add_module(name, nn.Identity())
    return part


def run_part(part: nn.Module, inputs: dict[str, Tensor], call: AttentionCall) -> Tensor:
    """The hidden states [B, T, hidden] after the last layer of a `decoder_part`.

    Args:
        inputs: keyword arguments of the decoder; a part that begins after layer 0 gets `HIDDEN` instead of input_ids.
    """
    arguments: dict[str, Any] = dict(inputs)
    if HIDDEN in arguments:  # LAYER_INPUT: what the decoder does to its input (a scale, say) must not happen again
        arguments["inputs_embeds"] = arguments[LAYER_INPUT] = arguments.pop(HIDDEN)
    output: list[Tensor] = []
    part(**arguments, use_cache=False, **{ATTENTION_CALL: call, LAYER_OUTPUT: output})
    return output[0]


def embedding_name(model: LolcatsForCausalLM) -> str:
    """Path of the token embedding in the base model."""
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.model.named_modules() if module is embedding)


def _second(module: nn.Module) -> nn.Module:
    """Another module with the same parameters and children, whose own children and hooks can be changed."""
    second = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and (name == "_modules" or "_hooks" in name):
            vars(second)[name] = copy.copy(value)
    return second


def _hand_through(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return kwargs.get(LAYER_INPUT, hidden_states)


def _take_output(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    found = kwargs.get(LAYER_OUTPUT)
    if found is None:
        return
    if not isinstance(output, Tensor):
        raise UserError(
            f"{type(module).__name__} cannot be trained block by block: it returns {type(output).__name__} instead of"
            " a tensor; use transfer.block_mode=joint"
        )
    found.append(output)

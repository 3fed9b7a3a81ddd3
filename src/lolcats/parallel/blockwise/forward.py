"""The forward pass of one block: the family's own decoder, with the layers outside the block passed by.

The decoder makes masks and rotary embeddings as always and calls its layers in order. Layers before the block
hand through what they get, hidden states are put in where the block begins, and the pass ends where the block
does. So nothing here knows families of models, and layers keep their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lolcats.errors import UserError
from lolcats.modeling.call import SOFTMAX, AttentionCall
from lolcats.modeling.fused import SAMPLE_TOKENS
from lolcats.parallel.blockwise.layers import LayerBlock, decoder_layers
from lolcats.parallel.blockwise.weights import PartialModel

POSITIONS = ("position_ids", "rotary_positions")
"""Keys, in a batch, of what a `PackedDataset` says of positions."""
HIDDEN = "hidden_states"
"""Key, in a batch, of the hidden states [B, T, hidden] that go into a block's first layer."""


class BlockForward:
    """Runs a block whose weights are loaded; made by `loaded_block`."""

    def __init__(self, partial: PartialModel, block: LayerBlock) -> None:
        self.partial, self.block = partial, block
        self.decoder: nn.Module = partial.model.get_decoder()
        all_layers: Any = partial.model.model.get_submodule(decoder_layers(partial.model))
        self.before = list(all_layers[: block.begin])
        self.layers: list[nn.Module] = list(all_layers[block.begin : block.end])
        self._given: Tensor | None = None
        self._output: Tensor | None = None

    def __call__(self, inputs: dict[str, Tensor], call: AttentionCall = SOFTMAX) -> Tensor:
        """The hidden states [B, T, hidden] after the block.

        Args:
            inputs: `hidden_states`, for the first block `input_ids`; and those of `POSITIONS` that there are.
            call: what the linearized layers compute.
        """
        arguments: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if name in POSITIONS}
        if self.block.index == 0:
            arguments["input_ids"] = inputs["input_ids"]
        else:
            self._given = inputs[HIDDEN]
            arguments["inputs_embeds"] = self._given
        try:
            with suppress(_BlockEnds):
                self.decoder(**arguments, use_cache=False, attention_call=call)
            assert self._output is not None
            return self._output
        finally:
            self._given = self._output = None

    @torch.no_grad()
    def sample(self) -> Tensor:
        """The block's output [1, T, hidden] for a few tokens, with softmax attention."""
        model, device = self.partial.model, self.partial.device
        config = model.config.get_text_config()
        inputs = {"input_ids": torch.arange(min(SAMPLE_TOKENS, config.vocab_size), device=device)[None]}
        if self.block.index > 0:
            random = torch.Generator().manual_seed(0)
            hidden_BTD = torch.randn(1, SAMPLE_TOKENS, config.hidden_size, generator=random)
            inputs = {HIDDEN: hidden_BTD.to(device, model.model.dtype)}
        return self(inputs)

    def _put_in(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Pre-hook of the block's first layer: what the decoder did to its input (a scale, say) is undone."""
        if args:
            return (self._given, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._given}

    def _take_out(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Hook of the block's last layer."""
        if not isinstance(output, Tensor):
            raise UserError(
                f"{type(self.partial.model.model).__name__} cannot be trained block by block: its layers return"
                f" {type(output).__name__} instead of a tensor; use transfer.block_mode=joint"
            )
        self._output = output
        raise _BlockEnds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, the decoder runs this block only."""
        with ExitStack() as stack:
            for layer in self.before:
                stack.enter_context(_passed_by(layer))
            if self.block.index > 0:
                handle = self.layers[0].register_forward_pre_hook(self._put_in, with_kwargs=True)
                stack.callback(handle.remove)
            stack.callback(self.layers[-1].register_forward_hook(self._take_out).remove)
            yield


@contextmanager
def loaded_block(partial: PartialModel, block: LayerBlock) -> Iterator[BlockForward]:
    """Within the block, the weights of `block` are on the device.

    Raises:
        UserError: as `PartialModel.loaded`.
    """
    path = decoder_layers(partial.model)
    base: Any = partial.model.model
    parts = [f"{path}.{index}" for index in range(block.begin, block.end)]
    if block.index == 0:
        parts.append(embedding_name(base))
    forward = BlockForward(partial, block)
    with partial.loaded(*parts), forward.installed():
        yield forward


def embedding_name(base: Any) -> str:
    """Path of the token embedding in the base model."""
    embedding = base.get_input_embeddings()
    return next(name for name, module in base.named_modules() if module is embedding)


@contextmanager
def _passed_by(layer: nn.Module) -> Iterator[None]:
    layer.forward = _hand_through
    try:
        yield
    finally:
        del layer.forward


def _hand_through(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


class _BlockEnds(Exception):
    """Ends a forward pass where the block ends."""

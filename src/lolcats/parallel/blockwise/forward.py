"""The forward pass of one block, see `lolcats.modeling.decoder.decoder_part`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lolcats.modeling.call import SOFTMAX, AttentionCall
from lolcats.modeling.decoder import LAYER_INPUT, LAYER_OUTPUT, decoder_layers, decoder_part
from lolcats.modeling.fused import SAMPLE_TOKENS
from lolcats.parallel.blockwise.layers import LayerBlock
from lolcats.parallel.blockwise.weights import PartialModel

POSITIONS = ("position_ids", "rotary_positions")
"""Keys, in a batch, of what a `PackedDataset` says of positions."""
HIDDEN = "hidden_states"
"""Key, in a batch, of the hidden states [B, T, hidden] that go into a block's first layer."""


class BlockForward:
    """Runs a block whose weights are loaded; made by `loaded_block`."""

    def __init__(self, partial: PartialModel, block: LayerBlock) -> None:
        self.partial, self.block = partial, block
        self.decoder = decoder_part(partial.model, block.begin, block.end)
        self.layers = list(decoder_layers(partial.model)[1][block.begin : block.end])

    def __call__(self, inputs: dict[str, Tensor], call: AttentionCall = SOFTMAX) -> Tensor:
        """The hidden states [B, T, hidden] after the block.

        Args:
            inputs: `hidden_states`, for the first block `input_ids`; and those of `POSITIONS` that there are.
            call: what the linearized layers compute.
        """
        output: list[Tensor] = []
        arguments: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if name in POSITIONS}
        if self.block.index == 0:
            arguments["input_ids"] = inputs["input_ids"]
        else:
            # what the decoder does to its input (a scale, say) was done before the first block
            arguments |= {"inputs_embeds": inputs[HIDDEN], LAYER_INPUT: inputs[HIDDEN]}
        self.decoder(**arguments, use_cache=False, attention_call=call, **{LAYER_OUTPUT: output})
        return output[0]

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


@contextmanager
def loaded_block(partial: PartialModel, block: LayerBlock) -> Iterator[BlockForward]:
    """Within the block, the weights of `block` are on the device.

    Raises:
        UserError: as `PartialModel.loaded`.
    """
    path, _ = decoder_layers(partial.model)
    base: Any = partial.model.model
    parts = [f"{path}.{index}" for index in range(block.begin, block.end)]
    if block.index == 0:
        parts.append(embedding_name(base))
    with partial.loaded(*parts):
        yield BlockForward(partial, block)


def embedding_name(base: Any) -> str:
    """Path of the token embedding in the base model."""
    embedding = base.get_input_embeddings()
    return next(name for name, module in base.named_modules() if module is embedding)

"""FLOPs of a token in every pass of the recipe: two for each multiply-add of a matrix product, nothing else.

Layers made again by gradient checkpointing count. What the attention kernels make again does not: it shows in the
measured utilisation.
"""

from __future__ import annotations

from collections.abc import Sequence

from lolcats.config import AdjustSection
from lolcats.plan.shape import LayerShape, ModelShape

BACKWARD = 2
"""Products of a backward pass for each of the forward pass: the gradients of both factors."""
DIVERGENCE_HEADS = 5
"""Products with the head for KL: student's and teacher's logits, both again in the backward pass, and a gradient."""


def softmax_flops(layer: LayerShape, tokens: int) -> float:
    """Scores and values of causal softmax attention, mean over a sequence of `tokens`."""
    keys = (tokens + 1) / 2
    window = layer.sliding_window
    if window is not None and window < tokens:
        keys = window - window * (window - 1) / 2 / tokens
    return 4 * layer.heads * layer.head_dim * keys


def hybrid_flops(layer: LayerShape, tokens: int, mean_window: float) -> float:
    """Feature maps, window, state read by every query head and written by every state head."""
    window = 4 * layer.heads * layer.head_dim * min(mean_window, (tokens + 1) / 2)
    states = 2 * (layer.heads + layer.state_heads) * layer.features * layer.head_dim
    return window + map_flops(layer) + states


def map_flops(layer: LayerShape) -> float:
    """Queries and keys by the feature maps' weights."""
    return 2 * (layer.heads + layer.state_heads) * layer.head_dim * layer.columns


def frozen(layers: Sequence[LayerShape], tokens: int) -> float:
    """Forward pass of the original layers, without embedding and head."""
    return sum(2 * layer.matrices + softmax_flops(layer, tokens) for layer in layers)


def transfer(layers: Sequence[LayerShape], tokens: int, mean_window: float, *, to_the_end: bool = False) -> float:
    """The frozen forward pass and every linearized layer's own forward and backward pass.

    Args:
        to_the_end: a later block needs the last layer's output; else the pass ends in the last linearized layer.
    """
    last = max(index for index, layer in enumerate(layers) if layer.linear)
    total = frozen(layers, tokens)
    if not to_the_end:
        total -= frozen(layers[last + 1 :], tokens) + 2 * layers[last].after_attention
    students = sum(hybrid_flops(layer, tokens, mean_window) for layer in layers if layer.linear)
    return total + (1 + BACKWARD) * students


def adjust(shape: ModelShape, tokens: int, config: AdjustSection) -> float:
    """The student's forward and backward pass with LoRA and the head; every token is a label.

    Frozen matrices have no gradient of their own. Nothing before the first adapter has one at all, except with
    gradient checkpointing, which asks for one of the embeddings; it repeats every layer up to the last tensor that
    the backward pass needs, so not the MLP's last projection.
    """
    heads = 2 + (DIVERGENCE_HEADS if config.distill_factor else 0)
    head = heads * 2 * shape.hidden * shape.vocabulary
    layers = shape.layers
    matrices = sum(2 * layer.matrices for layer in layers)
    lora = 2 * shape.lora_parameters(config.lora_rank)
    attention = sum(
        hybrid_flops(layer, tokens, shape.mean_window) if layer.linear else softmax_flops(layer, tokens)
        for layer in layers
    )
    forward = matrices + lora + attention
    backward = matrices + BACKWARD * (lora + attention)
    if not config.train_feature_maps:
        backward -= sum(map_flops(layer) for layer in layers if layer.linear)
    if config.gradient_checkpointing:
        again = forward - sum(2 * shape.hidden * layer.mlp_outputs for layer in layers)
        return forward + again + backward + head
    return forward + backward - _without_gradient(shape, tokens, config.lora_rank) + head


def teacher(shape: ModelShape, tokens: int, config: AdjustSection) -> float:
    """The frozen forward pass that stage 2's loss compares with, if it does; its logits are in `adjust`."""
    return frozen(shape.layers, tokens) if config.distill_factor else 0.0


def _without_gradient(shape: ModelShape, tokens: int, rank: int) -> float:
    """Of the backward pass: layers before the first adapted one, and there the inputs of its first projections."""
    first, layer = shape.first_adapted, shape.layers[shape.first_adapted]
    inputs = sum(inputs for inputs, _ in layer.adapted) - layer.heads * layer.head_dim  # of q, k and v
    before = sum(2 * earlier.matrices + BACKWARD * softmax_flops(earlier, tokens) for earlier in shape.layers[:first])
    return before + 2 * (layer.matrices - layer.after_attention) + 2 * rank * inputs

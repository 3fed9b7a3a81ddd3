"""Bytes on one GPU at the moment when most are used, part by part, derived from what the training code holds.

N is the number of tokens of a micro-step, d the hidden size, e the bytes of a weight and of an activation.
No number here is fitted to a measurement; docs/scaling.md compares the sums with measured runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lolcats.config import AdjustSection
from lolcats.plan.shape import LayerShape, ModelShape
from lolcats.training.head_loss import part_size

FLOAT = 4
CHUNK = 64
"""Tokens of one state of the kernels (docs/architecture.md)."""
WORKSPACES = 3 * 32 * 2**20
"""PyTorch keeps a cuBLAS workspace, 32 MiB on Hopper, for each pair of thread and stream that multiplies: the main
stream, the stream of the captured micro-step, and the autograd thread."""
TUNING = 256 * 2**20
"""Buffer with which Triton clears the cache between timings, while kernels are tuned in the first steps."""
GATHERED_LAYERS = 3
"""FSDP2: the layer at work, the next one's gathered bytes, and its parameters while they are copied out."""
NF4 = 0.5 + FLOAT / 64
"""Bytes of a weight in 4 bits with one float32 scale for 64 weights (bitsandbytes' default)."""
ADAM = 2 * FLOAT
DIVERGENCE = 5 * FLOAT
"""Bytes of a logit in KL: log-probabilities of both, the teacher's exponential, their difference, the product."""


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU."""

    weights: float = 0.0
    trained: float = 0.0
    optimizer: float = 0.0
    """Gradients (also those of the captured micro-step) and Adam's two moments."""
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    """Workspaces, gathered shards, hidden states in transit."""

    @property
    def total(self) -> float:
        return self.weights + self.trained + self.optimizer + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Step:
    """A micro-step.

    Attributes:
        sequences, length: N = sequences * length.
        element: bytes of a weight and of an activation.
        graphs: micro-steps are CUDA graphs, which have gradients of their own.
    """

    sequences: int
    length: int
    element: int = 2
    graphs: bool = True

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def row(self, columns: float) -> float:
        """Bytes of one activation with so many columns."""
        return self.tokens * columns * self.element


def transfer(shape: ModelShape, layers: Sequence[LayerShape], step: Step, *, beside: int) -> Memory:
    """Stage 1 over the given layers, which lie on the GPU.

    Args:
        beside: parameters outside the layers that lie there, too.
    """
    weights = sum(layer.parameters for layer in layers) + beside
    trained = FLOAT * sum(layer.feature_parameters for layer in layers)
    largest = max((mlp_bytes(layer, shape, step) for layer in layers), default=0.0)
    attention = max((student_bytes(layer, shape, step) for layer in layers if layer.linear), default=0.0)
    return Memory(
        weights=weights * step.element,
        trained=trained,
        optimizer=_optimizer(trained, step),
        activations=max(largest, attention + TUNING),
        buffers=WORKSPACES,
    )


def adjust(shape: ModelShape, step: Step, config: AdjustSection) -> Memory:
    """Stage 2 of the whole model on one GPU, every token a label."""
    rank, checkpointing = config.lora_rank, config.gradient_checkpointing
    lora, maps = FLOAT * shape.lora_parameters(rank), FLOAT * shape.feature_parameters
    stored = [saved(layer, shape, step, rank) for layer in shape.layers]
    # Checkpointing asks for a gradient of the embeddings; else nothing before the first adapter has one.
    kept = len(stored) * step.row(shape.hidden) if checkpointing else sum(stored[shape.first_adapted :])
    again = max(stored) if checkpointing else 0.0
    # The head: the last norm's input and output, the rows with labels and their gradient.
    head = step.row(4 * shape.hidden)
    part = min(part_size(shape.vocabulary), step.tokens) * shape.vocabulary
    # The last layer's backward pass: gradients of the residual stream and of the MLP's product.
    backward = max(step.row(2 * shape.hidden + layer.mlp_outputs) for layer in shape.layers) + again
    moments = [(head, part * step.element), (backward, 0.0)]
    if config.distill_factor:  # the teacher's pass, then its rows
        moments.append((head + max(mlp_bytes(layer, shape, step) for layer in shape.layers), 0.0))
        moments.append((head + step.row(shape.hidden), part * DIVERGENCE))
    most, logits = max(moments, key=sum)
    return Memory(
        weights=shape.parameters * step.element,
        trained=lora + maps,
        optimizer=_optimizer(lora + (maps if config.train_feature_maps else 0.0), step),
        activations=kept + most,
        logits=logits,
        buffers=WORKSPACES,
    )


def evaluation(shape: ModelShape, step: Step) -> float:
    """Validation in stage 2: logits of a micro-batch and a copy of those with labels; no activations are kept."""
    return 2 * step.row(shape.vocabulary)


def saved(layer: LayerShape, shape: ModelShape, step: Step, rank: int) -> float:
    """What one layer keeps for stage 2's backward pass.

    Frozen projections keep nothing of their input, adapted ones keep it once.
    """
    heads = (layer.heads + 2 * layer.kv_heads) * layer.head_dim  # q, k, v
    outputs = layer.heads * layer.head_dim
    per_row = layer.heads * FLOAT * (3 if layer.linear else 1)  # the kernels' sums; softmax's logarithm of one
    columns = heads + outputs + layer.mlp_inputs
    states = layer.state_heads * layer.features * layer.head_dim / CHUNK  # the kernels', one for every chunk
    if layer.adapted:
        columns += shape.hidden + rank * len(layer.adapted)
    if shape.fused:
        columns += 2 * shape.hidden  # the inputs of two norms
        per_row += 2 * FLOAT
    else:
        columns += layer.mlp_outputs  # the activation's result, a factor of the product
        per_row += 2 * FLOAT * (shape.hidden + 1)  # norms compute in float32
    return step.row(columns + states) + step.tokens * per_row


def sharded(memory: Memory, shape: ModelShape, step: Step, gpus: int, *, offload: bool) -> Memory:
    """The same under FSDP2 over `gpus`: frozen weights in shards; what is trained, and embeddings that the head
    shares, on every GPU (lolcats.parallel.sharding).

    Args:
        offload: the shards lie in host memory.
    """
    tied = 0 if shape.head else shape.embedding * step.element
    divided = 0.0 if offload else (memory.weights - tied) / gpus
    gathered = GATHERED_LAYERS * max(layer.parameters for layer in shape.layers)
    ends = max(shape.embedding, shape.head) if shape.head else 0
    return replace(memory, weights=divided + tied, buffers=memory.buffers + (gathered + ends) * step.element)


def quantised(memory: Memory, shape: ModelShape, step: Step) -> Memory:
    """The same with the layers' matrices in 4 bits; the largest one is unpacked while it is used."""
    matrices = sum(layer.matrices for layer in shape.layers)
    largest = max(layer.matrices for layer in shape.layers)  # no more than a layer's
    return replace(
        memory,
        weights=memory.weights - matrices * (step.element - NF4),
        buffers=memory.buffers + largest * step.element,
    )


def activation_cache_bytes(tokens: int, length: int, hidden: int, element: int = 2) -> int:
    """Hidden states between two blocks: 2 T d of arXiv:2410.10254, section on block-wise training, and an entry of 8
    bytes for every whole sequence."""
    sequences = tokens // length
    return sequences * (length * hidden * element + 8)


def _optimizer(trained: float, step: Step) -> float:
    """Beside trained bytes: gradients, those of a captured micro-step, two moments."""
    return trained * (1 + (1 if step.graphs else 0) + ADAM / FLOAT)


def mlp_bytes(layer: LayerShape, shape: ModelShape, step: Step) -> float:
    """Embeddings, the layer's input, the stream after attention and its norm; the MLP's projections and product."""
    return step.row(4 * shape.hidden + layer.mlp_inputs + layer.mlp_outputs)


def student_bytes(layer: LayerShape, shape: ModelShape, step: Step) -> float:
    """Embeddings, the layer's input and its norm; q, k, v, softmax's output, the error; projections' gradients; states
    and their gradients; four numbers of every query."""
    outputs = layer.heads * layer.head_dim
    rows = 3 * shape.hidden + 3 * outputs + 2 * layer.kv_heads * layer.head_dim
    gradients = (layer.heads + layer.state_heads) * layer.columns
    states = 2 * layer.state_heads * layer.features * layer.head_dim / CHUNK
    return step.row(rows + gradients + states) + step.tokens * 4 * FLOAT * layer.heads

"""FLOPs of a token and bytes on a GPU, derived from what the training code computes and holds.

FLOPs are two for each multiply-add of a matrix product, nothing else; layers computed again by gradient checkpointing
count. Bytes are those of the moment when most are held. N is the number of tokens of a micro-step, d the hidden size.
No term is fitted to a measurement; tests/plan holds the sums against PyTorch's counter and against measured runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lolcats.config import AdjustSection
from lolcats.plan.shape import LayerShape, ModelShape
from lolcats.training.head import part_size

DIVERGENCE_PRODUCTS = 5
"""With the head, for KL: student's and teacher's logits, both again in the backward pass, and a gradient."""
DIVERGENCE_BYTES = 20
"""Of a logit in KL: log-probabilities of both, the teacher's exponential, their difference, the product; float32."""
WEIGHT, FLOAT = 2, 4
"""Bytes of a frozen parameter, and of a trained one."""
GATE_LABELS = 256
"""Most labels of a text for the gates (`lolcats.data.retrieval.retrieval_dataset`)."""
CHUNK = 64
"""Tokens of one state of the kernels (docs/architecture.md)."""
WORKSPACES = 3 * 32 * 2**20
"""PyTorch keeps a cuBLAS workspace, 32 MiB on Hopper, for each pair of thread and stream that multiplies: the main
stream, the stream of the captured micro-step, and the autograd thread."""
TUNING = 256 * 2**20
"""Buffer with which Triton clears the cache between timings, while kernels are tuned in the first steps."""
GATHERED_LAYERS = 3
"""FSDP2: the layer at work, the next one's gathered bytes, and its parameters while they are copied out."""
OPTIMIZER = 4
"""Bytes beside each of what is trained: gradient, that of the captured micro-step, Adam's two moments."""
NF4 = 0.5 + FLOAT / 64
"""Bytes of a weight in 4 bits with one float32 scale for 64 weights (bitsandbytes' default)."""


def softmax_flops(layer: LayerShape, tokens: int) -> float:
    """Scores and values of causal softmax attention, mean over a sequence of `tokens`."""
    keys = (tokens + 1) / 2
    window = layer.sliding_window
    if window is not None and window < tokens:
        keys = window - window * (window - 1) / 2 / tokens
    return 4 * layer.heads * layer.head_dim * keys


def hybrid_flops(layer: LayerShape, tokens: int, mean_window: float) -> float:
    """Linear heads: feature maps, window, state read by every query head and written by every state head."""
    window = 4 * layer.heads * layer.head_dim * min(mean_window, (tokens + 1) / 2)
    states = layer.features * layer.head_dim
    maps = layer.head_dim * layer.columns
    return layer.linear_share * (window + 2 * (layer.heads + layer.state_heads) * (states + maps))


def attention_flops(layer: LayerShape, tokens: int, mean_window: float) -> float:
    """Exact and linear heads."""
    exact = (1 - layer.linear_share) * softmax_flops(layer, tokens)
    return exact + hybrid_flops(layer, tokens, mean_window)


def forward_flops(shape: ModelShape, tokens: int) -> float:
    """Forward pass of a token without embedding and head, mean over a sequence of `tokens`: what reading it takes."""
    return sum(2 * layer.matrices + attention_flops(layer, tokens, shape.mean_window) for layer in shape.layers)


def frozen_flops(layers: Sequence[LayerShape], tokens: int) -> float:
    """Forward pass of the original layers, without embedding and head."""
    return sum(2 * layer.matrices + softmax_flops(layer, tokens) for layer in layers)


def transfer_flops(layers: Sequence[LayerShape], tokens: int, mean_window: float) -> float:
    """Stage 1: the frozen forward pass, and every linearized layer's own forward and backward pass.

    Args:
        layers: those that run; the pass ends with the last linearized one.
    """
    students = sum(hybrid_flops(layer, tokens, mean_window) for layer in layers)
    return frozen_flops(layers, tokens) + 3 * students


def adjust_flops(shape: ModelShape, tokens: int, config: AdjustSection) -> float:
    """Stage 2: the student's forward and backward pass with LoRA and the head; every token is a label.

    Frozen matrices have no gradient of their own. Layers before the first adapter have no backward pass, except with
    gradient checkpointing, which asks for a gradient of the embeddings.
    """
    forward, backward = [], []
    for layer in shape.layers:
        trained = 2 * layer.lora_parameters(config.lora_rank) + attention_flops(layer, tokens, shape.mean_window)
        forward.append(2 * layer.matrices + trained)
        backward.append(2 * layer.matrices + 2 * trained)
    products = 2 + (DIVERGENCE_PRODUCTS if config.distill_factor else 0)
    head = products * 2 * shape.hidden * shape.vocabulary
    if config.gradient_checkpointing:
        return 2 * sum(forward) + sum(backward) + head
    return sum(forward) + sum(backward[shape.first_adapted :]) + head


def gates_flops(shape: ModelShape, tokens: int, *, gradient_checkpointing: bool) -> float:
    """The choice of exact heads without the teacher: softmax attention beside hybrid in every layer that has linear
    heads, forward and backward through frozen matrices; every text has all the labels that it can have."""
    forward, backward = [], []
    for layer in shape.layers:
        attention = attention_flops(layer, tokens, shape.mean_window)
        attention += softmax_flops(layer, tokens) if layer.linear else 0.0
        forward.append(2 * layer.matrices + attention)
        backward.append(2 * layer.matrices + 2 * attention)
    labels = min(GATE_LABELS, tokens) / tokens
    head = labels * DIVERGENCE_PRODUCTS * 2 * shape.hidden * shape.vocabulary
    if gradient_checkpointing:
        return 2 * sum(forward) + sum(backward) + head
    return sum(forward) + sum(backward[shape.linear_layers[0] :]) + head


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU.

    Attributes:
        optimizer: gradients (also those of the captured micro-step) and Adam's two moments.
        buffers: workspaces, gathered shards, hidden states in transit.
        validation: logits, beside all else, because a CUDA graph keeps its memory.
    """

    weights: float = 0.0
    trained: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    validation: float = 0.0

    @property
    def peak(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Step:
    """A micro-step.

    Attributes:
        sequences, length: N = sequences * length.
        element: bytes of a weight and of an activation.
    """

    sequences: int
    length: int
    element: int = 2

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def row(self, columns: float) -> float:
        """Bytes of one activation with so many columns."""
        return self.tokens * columns * self.element


def transfer_memory(shape: ModelShape, layers: Sequence[LayerShape], step: Step, *, beside: int) -> Memory:
    """Stage 1 over the given layers, which lie on the GPU.

    Args:
        beside: parameters outside the layers that lie there, too.
    """
    trained = FLOAT * sum(layer.feature_parameters for layer in layers)
    frozen = max(frozen_bytes(layer, shape, step) for layer in layers)
    student = max((_student_bytes(layer, shape, step) for layer in layers if layer.linear), default=0.0)
    return Memory(
        weights=step.element * (sum(layer.parameters for layer in layers) + beside),
        trained=trained,
        optimizer=OPTIMIZER * trained,
        activations=max(frozen, student + TUNING),
        buffers=WORKSPACES,
    )


def adjust_memory(shape: ModelShape, step: Step, config: AdjustSection) -> Memory:
    """Stage 2 of the whole model on one GPU, every token a label."""
    rank, checkpointing = config.lora_rank, config.gradient_checkpointing
    lora = FLOAT * sum(layer.lora_parameters(rank) for layer in shape.layers)
    maps = FLOAT * shape.feature_parameters
    saved = [saved_bytes(layer, shape, step, rank) for layer in shape.layers]
    kept, backward = _backward_bytes(shape, step, saved, shape.first_adapted, checkpointing)
    # The head: the last norm's input and output, the rows with labels and their gradient; with KL the teacher's rows.
    head = step.row(4 * shape.hidden)
    count = min(part_size(shape.vocabulary), step.tokens) * shape.vocabulary
    moments = [(head, float(count * step.element)), (backward, 0.0)]
    if config.distill_factor:
        moments.append((head + max(frozen_bytes(layer, shape, step) for layer in shape.layers), 0.0))
        moments.append((head + step.row(shape.hidden), count * DIVERGENCE_BYTES))
    most, logits = max(moments, key=sum)
    return Memory(
        weights=shape.parameters * step.element,
        trained=lora + maps,
        optimizer=OPTIMIZER * (lora + (maps if config.train_feature_maps else 0.0)),
        activations=kept + most,
        logits=logits,
        buffers=WORKSPACES,
        validation=2 * step.row(shape.vocabulary),  # logits of a micro-batch and a copy of those with labels
    )


def gates_memory(shape: ModelShape, step: Step, *, gradient_checkpointing: bool) -> Memory:
    """The choice of exact heads on one GPU: nothing is trained but a number for each KV head."""
    saved = [
        saved_bytes(layer, shape, step) + (_gate_bytes(layer, step) if layer.linear else 0.0) for layer in shape.layers
    ]
    kept, backward = _backward_bytes(shape, step, saved, shape.linear_layers[0], gradient_checkpointing)
    head = step.row(2 * shape.hidden)  # the last norm's input and output
    labels = step.sequences * min(GATE_LABELS, step.length)
    count = min(part_size(shape.vocabulary), labels) * shape.vocabulary
    most, logits = max((head, float(count * DIVERGENCE_BYTES)), (backward, 0.0), key=sum)
    return Memory(
        weights=shape.parameters * step.element,
        trained=FLOAT * shape.feature_parameters,
        activations=kept + most,
        logits=logits,
        buffers=WORKSPACES,
    )


def sharded_memory(memory: Memory, shape: ModelShape, gpus: int, *, offload: bool) -> Memory:
    """The same under FSDP2 over `gpus`: frozen weights in shards; what is trained, and embeddings that the head
    shares, on every GPU (lolcats.parallel.sharding).

    Args:
        offload: the shards lie in host memory.
    """
    tied = 0 if shape.head else shape.embedding * WEIGHT
    shard = 0.0 if offload else (memory.weights - tied) / gpus
    gathered = GATHERED_LAYERS * max(layer.parameters for layer in shape.layers)
    ends = max(shape.embedding, shape.head) if shape.head else 0
    return replace(memory, weights=shard + tied, buffers=memory.buffers + (gathered + ends) * WEIGHT)


def four_bit_memory(memory: Memory, shape: ModelShape) -> Memory:
    """The same with the layers' matrices in 4 bits; the largest layer's are unpacked while it is used."""
    matrices = [layer.matrices for layer in shape.layers]
    weights = memory.weights - sum(matrices) * (WEIGHT - NF4)
    return replace(memory, weights=weights, buffers=memory.buffers + max(matrices) * WEIGHT)


def hidden_state_bytes(tokens: int, length: int, hidden: int) -> int:
    """Hidden states between two blocks on disk: 2 T d of arXiv:2410.10254, section on block-wise training, and an
    entry of 8 bytes for every whole sequence."""
    return tokens // length * (length * hidden * 2 + 8)


def frozen_bytes(layer: LayerShape, shape: ModelShape, step: Step) -> float:
    """Forward pass without gradients: embeddings, the layer's input, the stream after attention and its norm; the
    MLP's projections and product."""
    return step.row(4 * shape.hidden + layer.mlp_inputs + layer.mlp_outputs)


def _backward_bytes(
    shape: ModelShape, step: Step, saved: Sequence[float], first: int, checkpointing: bool
) -> tuple[float, float]:
    """What all layers keep, those before the first one with a gradient nothing; and what the last layer's backward
    pass adds: gradients of the residual stream and of the MLP's product."""
    gradients = max(step.row(2 * shape.hidden + layer.mlp_outputs) for layer in shape.layers)
    if checkpointing:
        return len(saved) * step.row(shape.hidden), gradients + max(saved)
    return sum(saved[first:]), gradients


def saved_bytes(layer: LayerShape, shape: ModelShape, step: Step, rank: int | None = None) -> float:
    """What one layer keeps for the backward pass.

    Frozen projections keep nothing of their input, adapted ones keep it once.

    Args:
        rank: of the adapters; None: there are none.
    """
    heads = (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim  # q, k, v, output
    # The kernels' states, one for every chunk, and sums; softmax's logarithm of one.
    states = layer.linear_share * layer.state_heads * layer.features * layer.head_dim / CHUNK
    columns = heads + states + layer.mlp_inputs
    floats = layer.heads * (1 + 2 * layer.linear_share)
    if 0 < layer.exact < layer.kv_heads:
        columns += layer.heads * layer.head_dim  # both kinds' outputs, joined
    if layer.adapted and rank is not None:
        columns += shape.hidden + rank * len(layer.adapted)
    if shape.fused:
        columns += 2 * shape.hidden  # the inputs of two norms
        floats += 2
    else:
        columns += layer.mlp_outputs  # the activation's result, a factor of the product
        floats += 2 * (shape.hidden + 1)  # norms compute in float32
    return step.row(columns) + step.tokens * floats * FLOAT


def _gate_bytes(layer: LayerShape, step: Step) -> float:
    """What a layer keeps beside, as it computes softmax attention, too: its output and a logarithm."""
    return step.row(layer.heads * layer.head_dim) + step.tokens * layer.heads * FLOAT


def _student_bytes(layer: LayerShape, shape: ModelShape, step: Step) -> float:
    """Embeddings, the layer's input and its norm; q, k, v, softmax's output, the error; projections' gradients; states
    and their gradients; four numbers of every query."""
    columns = 3 * shape.hidden + (3 * layer.heads + 2 * layer.kv_heads) * layer.head_dim
    gradients = (layer.heads + layer.state_heads) * layer.columns
    states = 2 * layer.state_heads * layer.features * layer.head_dim / CHUNK
    return step.row(columns + layer.linear_share * (gradients + states)) + step.tokens * 4 * FLOAT * layer.heads

"""The least that a decoding step must move and compute, counted from the model's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map


@dataclass(frozen=True)
class Work:
    """Of one step: bytes read and written once for all sequences, bytes and FLOPs of each sequence."""

    weight_bytes: float
    sequence_bytes: float
    sequence_flops: float

    def floor(self, batch: int, limits: dict[str, float]) -> dict[str, float]:
        """Milliseconds and tokens/s at the device's ceilings, if moving and computing overlap perfectly."""
        moved = self.weight_bytes + batch * self.sequence_bytes
        flops = batch * self.sequence_flops
        memory_ms = moved / limits["copy_tb_s"] / 1e9
        matmul_ms = flops / limits["matmul_tflop_s"] / 1e9
        floor_ms = max(memory_ms, matmul_ms)
        return {
            "floor_bytes": moved,
            "floor_flops": flops,
            "floor_memory_ms": memory_ms,
            "floor_matmul_ms": matmul_ms,
            "floor_ms": floor_ms,
            "floor_tokens_per_s": batch / floor_ms * 1e3,
        }


def linear_work(model: LolcatsForCausalLM) -> Work:
    """A step with linear attention, its window full; means over positions.

    The window's visible keys and values are read, the new token's are written. The state is read once a step
    and written when it changes: once a block in the terraced window, together with reading the block that left.
    Feature maps count as weights.
    """
    weight_bytes, flops = _weights(model)
    moved = 0.0
    for _, layer in model.linear_layers():
        spec, H, G, D = layer.config, layer.num_heads, layer.num_kv_heads, layer.head_dim
        itemsize = model.dtype.itemsize
        terraced = spec.window == "terraced" and spec.window_size > 0
        block = spec.window_size if terraced else 1
        window = spec.reach + (block + 1) / 2 if terraced else spec.window_size
        keys = spec.sinks + window
        flops += 4 * H * D * keys
        moved += 2 * G * D * itemsize * (keys + 1)
        weight_bytes += sum(parameter.nbytes for parameter in layer.parameters())
        if spec.feature_map is None:
            continue
        S, _, P = layer.k_weight.shape
        F = P * get_feature_map(spec.feature_map).multiple
        flops += (H + S) * (2 * D * P + 2 * F * (D + 1))  # queries meet the state; one key a step goes into it
        moved += S * F * (D + 1) * 4 * (1 + 1 / block) + 2 * G * D * itemsize
    return Work(weight_bytes, moved, flops)


def softmax_work(model: LolcatsForCausalLM, context: float) -> Work:
    """A step of the original model after `context` tokens: all keys and values read, one pair written."""
    weight_bytes, flops = _weights(model)
    moved = 0.0
    for _, layer in model.linear_layers():
        moved += 2 * layer.num_kv_heads * layer.head_dim * model.dtype.itemsize * (context + 2)
        flops += 4 * layer.num_heads * layer.head_dim * (context + 1)
    return Work(weight_bytes, moved, flops)


def _weights(model: LolcatsForCausalLM) -> tuple[float, float]:
    """(bytes read, FLOPs a token) of the original model's weights; of the embedding a step reads single rows."""
    own = {id(parameter) for _, layer in model.linear_layers() for parameter in layer.parameters()}
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if embedding.weight is not head.weight:
        own.add(id(embedding.weight))
    read = [parameter for parameter in model.parameters() if id(parameter) not in own]
    return sum(x.nbytes for x in read), sum(2 * x.numel() for x in read if x.dim() == 2)

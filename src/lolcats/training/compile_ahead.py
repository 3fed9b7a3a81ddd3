"""Compiling the kernels of training while its data are still being read.

On a machine that has not seen them, both stages' attention kernels take longer to compile than most data to tokenise.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lolcats.config import AdjustSection, LinearizeConfig, TransferSection
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.layer import HybridAttention


@contextmanager
def compiling_ahead(model: LolcatsConfig, config: LinearizeConfig, device: torch.device) -> Iterator[None]:
    """Within the block, on a GPU, other threads call one layer's attention as both stages will.

    The end of the block waits for them: while CUDA graphs are captured, no other thread may use the GPU. Their errors
    are ignored, since training meets them again where they can be explained.

    Args:
        model: configuration of the linearized model.
    """
    if device.type != "cuda" or config.adjust.softmax_control:
        yield
        return
    with ThreadPoolExecutor(2, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        if config.transfer.enabled:
            pool.submit(run_transfer, model, config, device)
        if config.adjust.enabled:
            pool.submit(run_adjust, model, config, device)
        yield


def run_transfer(model: LolcatsConfig, config: LinearizeConfig, device: torch.device) -> None:
    """A layer's part of evaluations and of a step of stage 1."""
    attention, (q, k, v) = _layer(model, config, config.transfer, device)
    with torch.no_grad():
        attention(*(attention.heads.take_linear(x) for x in (q, k, v)))
    attention.output_mse(q, k, v, torch.zeros_like(q)).backward()


def run_adjust(model: LolcatsConfig, config: LinearizeConfig, device: torch.device) -> None:
    """A layer's part of a step of stage 2."""
    attention, inputs = _layer(model, config, config.adjust, device)
    attention.requires_grad_(config.adjust.train_feature_maps)
    inputs = [attention.heads.take_linear(x).requires_grad_() for x in inputs]
    attention(*inputs)[0].backward(torch.zeros_like(inputs[0]))


def _layer(
    model: LolcatsConfig, config: LinearizeConfig, stage: TransferSection | AdjustSection, device: torch.device
) -> tuple[HybridAttention, list[Tensor]]:
    """The first linear layer's attention, and zeros for its queries, keys and values, as a model lays them out."""
    heads = model.linear_layers[0]
    zeros = replace(model.attention, feature_init="zeros")  # draws no random numbers, which are the main thread's
    shape = heads.num_heads, heads.num_kv_heads, heads.head_dim
    attention = HybridAttention(zeros, *shape, exact=heads.exact, device=device)
    dtype: Any = model.dtype
    tokens = (stage.data or config.data).sequence_length
    inputs = [
        torch.zeros(stage.micro_batch_size, tokens, count, heads.head_dim, dtype=dtype, device=device)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    ]
    return attention, [x.transpose(1, 2) for x in inputs]

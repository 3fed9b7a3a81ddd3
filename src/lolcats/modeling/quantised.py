"""Checkpoints whose weights are quantised, of every kind that transformers loads and can train over.

How a kind stores its weights is not known here. transformers says whether it works on this machine; what it can
dequantise while loading is dequantised then, as such kinds have no gradient, or lose their compression in the first
forward pass; any other stays as it is. The matrix of a quantised layer is what the layer makes of the unit vectors.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from lolcats.errors import UserError

# which says at every product with 8-bit weights that it computes in float16
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a checkpoint are quantised.

    Attributes:
        method: transformers' name of the kind: "bitsandbytes", "gptq", "compressed-tensors", ...
        stays: whether they stay so in memory; else they are dequantised while they are loaded.
    """

    method: str
    stays: bool


def quantisation(config: PreTrainedConfig, path: str, device: torch.device) -> Quantisation | None:
    """How the checkpoint of `config` in `path` is quantised, None if it is not; its weights are not read.

    `config` is changed so that transformers dequantises the weights if it can.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = str(settings.get("quant_method", "bitsandbytes"))
    try:
        parsed = AutoQuantizationConfig.from_dict(copy.deepcopy(settings))
        stays = not hasattr(parsed, "dequantize")
        if not stays:
            parsed.dequantize = settings["dequantize"] = True
        quantizer = AutoHfQuantizer.from_config(parsed, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
        trainable = not stays or quantizer.is_trainable
    except (ImportError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"the weights of {path} are quantised ({method}), which does not load on {device} here: {error}. Change"
            " that, or choose the checkpoint in bf16, fp16 or fp32"
        ) from error
    if not trainable:
        raise UserError(
            f"the weights of {path} are quantised ({method}), and transformers can neither train over weights of this"
            " kind nor dequantise them; choose the checkpoint in bf16, fp16 or fp32"
        )
    return Quantisation(method, stays)


def forget_quantisation(model: PreTrainedModel) -> None:
    """Take back what transformers wrote on a quantised model: what is saved later has plain tensors."""
    loaded: Any = model
    loaded.hf_quantizer, loaded.is_quantized, loaded._weight_conversions = None, False, None
    loaded.config.__dict__.pop("quantization_config", None)


def dense_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A dequantised model's weights in modules as the family makes them.

    compressed-tensors leaves its own forward on every module, which rounds activations and has no gradient.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        dense = type(model)(model.config)
    names = dense.state_dict().keys()
    dense.load_state_dict({name: x for name, x in model.state_dict().items() if name in names}, assign=True)
    dense.tie_weights()
    dense.generation_config = model.generation_config
    return dense.to(model.device)  # type: ignore[arg-type]  # buffers, which are not in the files


def refuse_undense(model: nn.Module, path: str) -> None:
    """Refuse a model that has quantised weights outside its linear layers: they could not be exported."""
    inside = {id(x) for linear in quantised_linears(model).values() for x in linear.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside and not _is_dense(parameter):
            raise UserError(
                f"{path}: {name} is quantised and belongs to no linear layer, so that it could not be written"
                " dequantised; choose the checkpoint in bf16, fp16 or fp32"
            )


def refuse_without_gradient(model: PreTrainedModel) -> None:
    """Refuse a model through whose quantised layers no gradient passes; gates and stage 2 need it."""
    for kind, linear in {type(linear): linear for linear in quantised_linears(model).values()}.items():
        x = torch.zeros(1, linear.in_features, dtype=model.dtype, device=_device(linear), requires_grad=True)
        if not linear(x).requires_grad:
            raise UserError(
                f"{kind.__name__}, which computes with the quantised weights here, has no gradient, which gates and"
                " stage 2 need; choose the checkpoint in bf16, fp16 or fp32"
            )


def quantised_linears(model: nn.Module) -> dict[str, Any]:
    """Quantised linear layers by path; one under several paths has them all."""
    return {path: m for path, m in model.named_modules(remove_duplicate=False) if _is_quantised(m)}


def _is_quantised(module: nn.Module) -> bool:
    """Whether a module is a linear layer that does not hold its matrix [out, in] as it is."""
    if hasattr(module, "lora_A") or not is_linear(module):  # PEFT's layers, which hold the linear one
        return False
    weight = getattr(module, "weight", None)
    return weight is None or not _is_dense(weight) or weight.shape != (module.out_features, module.in_features)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer or what a kind of quantisation puts in its place."""
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


@torch.no_grad()
def dense_weight(linear: Any, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] of a quantised linear layer, in `dtype`, as it computes with it."""
    bias = linear.bias
    linear.bias = None  # added and subtracted again, a large one would cost digits
    try:
        return linear(torch.eye(linear.in_features, dtype=dtype, device=_device(linear))).T.to(dtype)
    finally:
        linear.bias = bias


def _is_dense(tensor: Tensor) -> bool:
    plain = type(tensor.data) is Tensor or isinstance(tensor, DTensor)
    return plain and tensor.is_floating_point() and tensor.dtype.itemsize > 1  # not 8-bit floats, which need scales


def _device(linear: nn.Module) -> torch.device:
    return next(chain(linear.parameters(), linear.buffers())).device  # GPTQ's are buffers alone

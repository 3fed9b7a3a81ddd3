"""Operators. Callers see one function; which implementation runs is decided inside."""

from lolcats.ops.hybrid_attention import HybridParams, HybridState, hybrid_attention, initial_state
from lolcats.ops.hybrid_attention.output_mse import output_mse
from lolcats.ops.hybrid_attention.weights import attention_weights
from lolcats.ops.hybrid_attention.weights_loss import weights_cross_entropy

__all__ = [
    "HybridParams",
    "HybridState",
    "attention_weights",
    "hybrid_attention",
    "initial_state",
    "output_mse",
    "weights_cross_entropy",
]

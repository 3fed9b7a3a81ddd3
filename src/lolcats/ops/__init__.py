"""Operators. Callers see one function; which implementation runs is decided inside."""

from lolcats.ops.hybrid_attention.api import hybrid_attention
from lolcats.ops.hybrid_attention.losses import attention_weights, output_mse, weights_cross_entropy
from lolcats.ops.hybrid_attention.state import HybridParams, HybridState, Scoring, initial_state

__all__ = [
    "HybridParams",
    "HybridState",
    "Scoring",
    "attention_weights",
    "hybrid_attention",
    "initial_state",
    "output_mse",
    "weights_cross_entropy",
]

"""Operators. Callers see one function; which implementation runs is decided inside."""

from lolcats.ops.hybrid_attention import HybridParams
from lolcats.ops.hybrid_attention import HybridSpec
from lolcats.ops.hybrid_attention import HybridState
from lolcats.ops.hybrid_attention import hybrid_attention
from lolcats.ops.hybrid_attention import initial_state

__all__ = ["HybridParams", "HybridSpec", "HybridState", "hybrid_attention", "initial_state"]

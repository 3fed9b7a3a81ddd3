"""Trainable parts that linearizing adds to a model."""

from lolcats.modules.linear_attention import LinearAttention

__all__ = ["LinearAttention"]

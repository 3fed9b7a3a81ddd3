"""Weights on disk: reading checkpoints whole, by rows or by blocks, and writing complete model folders."""

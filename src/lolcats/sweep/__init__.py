"""Sweeps: many runs of `linearize` from one file, their results in one table."""

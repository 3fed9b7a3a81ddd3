"""Measuring models."""

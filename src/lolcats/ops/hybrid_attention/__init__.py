"""Hybrid attention: softmax over a window, linear attention before it, one shared denominator."""

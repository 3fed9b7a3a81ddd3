"""The hybrid attention as Triton kernels. `api.supports` says which calls they take; this file needs no Triton.

    op            the calls of forward and backward: with a gradient, or many tokens with states
    forward       states before every chunk, then outputs
    backward      the gradients of both
    decode        one token with a state
    softmax_step  one token of softmax attention, for exact heads; keys of one token over several programs
    store_tokens  new keys and values into a cache, or behind its own, in 8 bits if it keeps these
    operands      what a call gives to its kernels, and where packed sequences lie
    tiles         what all kernels share: loads, products, feature maps, windows

Shape suffixes in kernels: M rows of a query tile, N keys of a key tile, S sinks, P columns of a projection padded to
a power of two, D head_dim padded to a power of two. Sizes are fields of an `operands.KernelShape`.
"""

from importlib.util import find_spec

_HAS_TRITON = find_spec("triton") is not None


def missing() -> str | None:
    """Why no kernel can run here, in one sentence; None: they can."""
    return None if _HAS_TRITON else "Triton is not installed."

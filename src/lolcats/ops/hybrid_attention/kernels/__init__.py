"""The hybrid attention as Triton kernels. Only `support` may be imported without Triton.

    support       which calls the kernels take
    op            the calls that `hybrid_attention` makes of forward and backward, as a function with a gradient
    prefill       many tokens with states, without one
    forward       states before every chunk, then outputs
    backward      the gradients of both
    decode        one token with a state
    softmax_step  one token of softmax attention, for exact heads
    splits        what steps share: keys of one token over several programs
    store_tokens  new keys and values into a cache, or behind its own, in 8 bits if it keeps these
    operands      what a call gives to its kernels
    segments      where packed sequences lie
    tiles         what all kernels share: loads, products, feature maps, windows

Shape suffixes in kernels: M rows of a query tile, N keys of a key tile, S sinks, P columns of a projection padded to
a power of two, D head_dim padded to a power of two. Sizes are fields of an `operands.KernelShape`.
"""

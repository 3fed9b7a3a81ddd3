"""The hybrid attention as Triton kernels. Only `support` may be imported without Triton.

Shape suffixes in kernels: M rows of a query tile, N keys of a key tile, P columns of a projection padded to
a power of two, D head_dim padded to a power of two.
"""

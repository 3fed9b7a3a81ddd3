"""The hybrid attention as Triton kernels. Only `support` may be imported without Triton."""

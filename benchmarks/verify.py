"""No speed without a right result: what benchmarks ask before they print how fast an implementation is.

On the device and with the settings and types that are timed, all results of a mode are compared
with those of `reference` in float32; of sequences too long for it, with those of `chunked` in float32, which the
shorter ones compare with it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_calls import AttentionBench, Inputs, make_call, make_inputs, trained
from torch import Tensor

from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.ops import HybridParams
from lolcats.plan import SHAPES

# Relative RMS errors. The tests' bounds are four times tighter in half precision (5e-3), at shorter sequences.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
KV_HEADS = BATCH = 2  # at most, so that the reference fits into memory; grids have more, kernels are the same
TOKENS = 1000  # of a model's layer


def verify(bench: AttentionBench, backend: str, mode: str, tokens: int) -> float:
    """The largest relative RMS error of the mode's results.

    Raises:
        UserError: it is too large, so that the speed means nothing.
    """
    device, kv_heads = torch.device(bench.device), min(KV_HEADS, bench.kv_heads)
    small = replace(bench, kv_heads=kv_heads, heads=bench.heads // bench.kv_heads * kv_heads)
    inputs = make_inputs(small, BATCH, tokens, mode, device)
    truth = "reference" if tokens <= bench.max_quadratic_tokens else "chunked"
    expected = make_call(small, truth, mode, _float32(inputs, mode))()
    found = make_call(small, backend, mode, inputs)()
    errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
    for index, error in enumerate(errors):
        if not error <= TOLERANCE[inputs.q.dtype]:
            raise UserError(f"wrong, not timed: result {index} of {mode} is {error:.1e} from {truth} in float32")
    return max(errors)


def verify_shape(
    shape: str, attention: AttentionConfig, modes: tuple[str, ...], dtype: str, device: str
) -> dict[str, float]:
    """`verify` of a model's attention layer as the model calls it, by mode.

    Args:
        shape: a name of `SHAPES`.
    """
    sizes = {
        field: SHAPES[shape][name]
        for field, name in (("heads", "num_attention_heads"), ("kv_heads", "num_key_value_heads"))
    }
    bench = AttentionBench(**sizes, head_dim=SHAPES[shape]["head_dim"], attention=attention, dtype=dtype, device=device)
    return {mode: verify(bench, "auto", mode, TOKENS) for mode in modes}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over that of `expected`; NaN if `found` has one."""
    if found.shape != expected.shape or expected.numel() == 0:
        return 0.0 if found.shape == expected.shape else float("inf")
    # Inputs are of size one. The gradient of gamma, the one vector, is zero where nothing has left the window.
    smallest = (1.0 if expected.dim() == 1 else 1e-2) * expected.numel() ** 0.5
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(smallest))


def _float32(x: Inputs, mode: str) -> Inputs:
    q, k, v, dy = (tensor.detach().float() for tensor in (x.q, x.k, x.v, x.dy))
    params = HybridParams(*(None if tensor is None else tensor.detach().clone() for tensor in x.params.tensors))
    return trained(Inputs(q, k, v, dy, params), mode)

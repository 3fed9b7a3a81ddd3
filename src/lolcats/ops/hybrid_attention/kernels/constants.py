"""Numbers that the kernels and their launches agree on."""

from __future__ import annotations

import triton
import triton.language as tl

from lolcats.ops.hybrid_attention.params import DENOMINATOR_FLOOR

# Tokens between two stored states; a multiple of every key tile.
STATE_CHUNK = 64
LOG2_E = 1.4426950408889634
# Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1).
INTERPRETED = bool(triton.knobs.runtime.interpret)

_FLOOR = tl.constexpr(DENOMINATOR_FLOOR)

"""GPUs that a plan can be made for, and the share of their peak rate that training reaches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lolcats.errors import UserError

GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gb: in 10^9 bytes, as sold. The driver shows a few percent more bytes, which are left to the CUDA
            context and to fragmentation.
        peak_tflop_s: bfloat16 matrix products with float32 sums, dense.
        link_gb_s: bytes that a GPU receives from the others of its machine, one direction.
        host_gb_s: bytes that it receives from host memory (PCIe, one direction).
    """

    name: str
    memory_gb: float
    peak_tflop_s: float
    link_gb_s: float
    host_gb_s: float


# Makers' data sheets (NVIDIA). Without NVLink the link is PCIe.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 180, 2250, 900, 64),
        Gpu("h200", 141, 989, 450, 64),
        Gpu("h100", 80, 989, 450, 64),
        Gpu("a100", 80, 312, 300, 32),
        Gpu("a100-40gb", 40, 312, 300, 32),
        Gpu("l40s", 48, 362, 32, 32),
        Gpu("rtx4090", 24, 165, 32, 32),
        Gpu("rtx3090", 24, 71, 32, 32),
    )
}

MEASURED_GPU = "h200"
MEASURED_TOKENS = 8 * 1024
"""Of a micro-step in the measurements."""
UTILISATION = {
    "transfer": {576: 0.21, 4096: 0.58},
    "adjust": {576: 0.18, 4096: 0.57},
    "frozen": {576: 0.34, 4096: 0.63},
}
"""Stage -> hidden size -> share of the peak rate, in `benchmarks/results/train_*_h200_2026-11-22.json`.

"frozen" is the original model's forward pass. Runs of 70B and 405B shapes (`scaling_llama3-*.json`), from which
nothing here comes, were within a fifth of the planned time (tests/plan/test_costs.py).
"""


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, in any spelling of case, spaces and hyphens."""
    plain = {_plain(known): gpu for known, gpu in GPUS.items()}
    if _plain(name) not in plain:
        raise UserError(
            f"no GPU named {name!r}; there are {', '.join(GPUS)}. For another one, name the nearest and give its memory"
            " with --gpu-memory"
        )
    return plain[_plain(name)]


def utilisation(stage: str, hidden: int) -> float:
    """Expected share of the peak rate: linear in log(hidden) between the measured sizes, the nearest one's outside."""
    sizes, shares = zip(*UTILISATION[stage].items(), strict=True)
    return float(np.interp(np.log(hidden), np.log(sizes), shares))


def flop_s(gpu: Gpu, stage: str, hidden: int) -> float:
    """Useful FLOP/s of one GPU."""
    return utilisation(stage, hidden) * gpu.peak_tflop_s * 1e12


def confidence(gpu: Gpu, hidden: int, step_tokens: int) -> str:
    """How far the hours can be trusted: what was measured, and where this plan is outside of it."""
    small, large = UTILISATION["transfer"]
    first, second = (utilisation(stage, hidden) for stage in ("transfer", "adjust"))
    sentences = [
        f"Hours assume {first:.0%} (stage 1) and {second:.0%} (stage 2) of the peak rate, measured on one"
        f" {MEASURED_GPU} with hidden sizes {small} and {large} and {MEASURED_TOKENS} tokens a micro-step."
    ]
    if gpu.name != MEASURED_GPU:
        sentences.append(f"That {gpu.name} reaches the same share of its peak is an assumption.")
    if hidden > large:
        sentences.append(f"Hidden size {hidden} is larger; measured runs of 70B and 405B were within 20 %.")
    elif hidden < small:
        sentences.append(f"Hidden size {hidden} is smaller, and will reach less.")
    elif small < hidden < large:
        sentences.append("Between the two sizes the share is interpolated: take it as good to a factor of 1.5.")
    if step_tokens < MEASURED_TOKENS and hidden < large:
        sentences.append(f"Micro-steps of only {step_tokens} tokens may take twice as long.")
    return " ".join(sentences)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum()).removeprefix("nvidia")

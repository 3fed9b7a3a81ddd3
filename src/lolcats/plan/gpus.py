"""GPUs that a plan can be made for, as their makers specify them."""

from __future__ import annotations

from dataclasses import dataclass

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


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, in any spelling of case, spaces and hyphens."""
    plain = {_plain(known): gpu for known, gpu in GPUS.items()}
    if _plain(name) not in plain:
        raise UserError(
            f"no GPU named {name!r}; there are {', '.join(GPUS)}. For another one, name the nearest and give its memory"
            " with --gpu-memory"
        )
    return plain[_plain(name)]


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum()).removeprefix("nvidia")

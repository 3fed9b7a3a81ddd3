"""Which launch configurations suit the attention kernels: time of each, for the lists in the kernels' files.

    python benchmarks/attention_configs.py --shapes 1x1024,1x16384,8x4096 --modes forward,train

Tries more configurations than the lists hold. For whoever changes a kernel or gets a new GPU; the lists are
then cut to the few that won somewhere.
"""

from __future__ import annotations

import argparse
from importlib import import_module

import torch

from lolcats.bench.attention import AttentionBench, make_call, make_inputs


def tiles(*sizes: tuple[int, int, int, int, int | None]) -> list[dict]:
    return [{"BM": m, "BN": n, "warps": w, "stages": s} | ({"registers": r} if r else {}) for m, n, w, s, r in sizes]


def columns(*sizes: tuple[int, int, int]) -> list[dict]:
    return [{"BD": d, "warps": w, "stages": s} for d, w, s in sizes]


def stages(*sizes: tuple[int, int | None]) -> list[dict]:
    return [{"warps": 4, "stages": s} | ({"registers": r} if r else {}) for s, r in sizes]


KERNELS = {
    "states.state_kernel": columns((64, 4, 1), (128, 4, 1), (32, 4, 1), (64, 2, 1), (128, 8, 1)),
    "output_kernel.output_kernel": tiles(
        (64, 64, 4, 1, None),
        (64, 64, 4, 2, None),
        (64, 64, 4, 3, None),
        (64, 64, 4, 1, 168),
        (64, 64, 4, 1, 128),
        (64, 32, 4, 1, 168),
        (64, 32, 4, 2, 168),
        (64, 32, 4, 2, 128),
        (64, 128, 4, 1, None),
        (64, 128, 4, 1, 168),
    ),
    "window_gradient.window_gradient_kernel": [
        {"BN": 64} | config for config in stages((1, 168), (1, None), (2, 168), (2, None), (1, 128))
    ],
    "query_gradient.query_gradient_kernel": stages((1, 168), (1, None), (2, 168), (2, None), (3, 168)),
    "state_gradient.state_gradient_kernel": columns((64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 4, 1), (128, 4, 2)),
    "key_gradient.key_gradient_kernel": stages((1, 168), (2, 168), (2, None), (3, 168), (3, None), (4, 168)),
    "weight_gradient.weight_gradient_kernel": [{"warps": w, "stages": s} for w, s in ((4, 2), (4, 3), (4, 4), (4, 5))],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1x1024,1x16384,8x4096")
    parser.add_argument("--modes", default="forward,train")
    given = parser.parse_args()
    bench = AttentionBench()
    tuned = {}
    for name, configs in KERNELS.items():
        module, kernel = name.split(".")
        tuned[kernel] = getattr(import_module(f"lolcats.ops.hybrid_attention.kernels.{module}"), kernel)
        tuned[kernel].narrow = tuned[kernel].autotuned(configs)
    for shape in given.shapes.split(","):
        batch, tokens = (int(part) for part in shape.split("x"))
        for mode in given.modes.split(","):
            for kernel in tuned.values():
                kernel.narrow.cache.clear()
                kernel.narrow.cache_results = False
                kernel.narrow.configs_timings = {}
            make_call(bench, "triton", mode, make_inputs(bench, batch, tokens, mode, torch.device(bench.device)))()
            print(f"\n{shape} {mode}")
            for name, kernel in tuned.items():
                timings = sorted(kernel.narrow.configs_timings.items(), key=lambda item: _median(item[1]))
                for config, timing in timings:
                    print(f"  {name:24s}{_median(timing):9.4f} ms  {config}")


def _median(timing: float | list[float]) -> float:
    return timing[0] if isinstance(timing, (list, tuple)) else timing


if __name__ == "__main__":
    main()

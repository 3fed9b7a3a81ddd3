"""Time and memory per token against the length of the sequence, from the JSON of benchmarks/attention.py.

python benchmarks/plot_attention.py benchmarks/results/attention_h200_2026-11-21.json docs/images/attention_h200.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

NAMES = {
    "triton": ("lolcats kernels", "C0"),
    "chunked": ("lolcats chunked (plain PyTorch)", "C2"),
    "sdpa_flash": ("softmax, FlashAttention-2", "C3"),
    "sdpa_cudnn": ("softmax, cuDNN", "C1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    report = json.loads(given.json.read_text())
    rows = [row for row in report["rows"] if row["batch"] == 1 and "median_ms" in row]
    figure, (time_axis, memory_axis) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, (label, color) in NAMES.items():
        for mode, style in (("forward", "-"), ("train", "--")):
            points = [row for row in rows if row["implementation"] == name and row["mode"] == mode]
            if not points:
                continue
            tokens = [row["tokens"] for row in points]
            time_axis.plot(
                tokens,
                [row["ns_per_token"] for row in points],
                style,
                color=color,
                marker=".",
                label=label if mode == "forward" else None,
            )
            memory_axis.plot(
                tokens,
                [row["extra_memory_mib"] * 1024 / row["tokens"] for row in points],
                style,
                color=color,
                marker=".",
            )
    for axis, title in ((time_axis, "time per token (ns)"), (memory_axis, "memory per token beyond inputs (KiB)")):
        axis.set(xscale="log", yscale="log", xlabel="tokens in the sequence", title=title)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    time_axis.plot([], [], "k-", label="forward")
    time_axis.plot([], [], "k--", label="forward + backward")
    time_axis.legend(fontsize=8)
    figure.suptitle(f"One attention layer of the Llama-3-8B shape, {report['provenance']['device']}, bfloat16")
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.picture, dpi=130)


if __name__ == "__main__":
    main()

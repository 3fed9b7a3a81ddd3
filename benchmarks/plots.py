"""The pictures of README and docs: JSON of benchmarks/attention.py and decode.py, rows of `lolcats sweep`.

python benchmarks/plots.py benchmarks/results/attention_h200_2026-11-21.json docs/images/attention_h200.png
python benchmarks/plots.py benchmarks/results/decode_llama3-8b_h200_2026-11-21.json docs/images/decode_h200.png
cd benchmarks/results
python ../plots.py hybrid_{,ends_,default_,window128_,bounded_,further_seeds_,rates_,32mib_}smollm2_h*.jsonl \\
    ../../docs/images/recall.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from recall_table import ALL, share

IMPLEMENTATIONS = {
    "triton": ("lolcats kernels", "C0"),
    "chunked": ("lolcats chunked (plain PyTorch)", "C2"),
    "sdpa_flash": ("softmax, FlashAttention-2", "C3"),
    "sdpa_cudnn": ("softmax, cuDNN", "C1"),
}
SYSTEMS = {"lolcats": ("linearized (lolcats)", "C0", "o"), "softmax": ("softmax (transformers)", "C1", "s")}


def attention(report: dict[str, Any]) -> Figure:
    """Time and memory per token against the length of one sequence."""
    rows = [row for row in report["rows"] if row["batch"] == 1 and "median_ms" in row]
    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axis, memory_axis = figure.subplots(1, 2)
    for name, (label, color) in IMPLEMENTATIONS.items():
        for mode, style in (("forward", "-"), ("train", "--")):
            points = [row for row in rows if row["implementation"] == name and row["mode"] == mode]
            tokens = [row["tokens"] for row in points]
            look = {"color": color, "marker": "."}
            shown = label if points and mode == "forward" else None
            time_axis.plot(tokens, [row["ns_per_token"] for row in points], style, label=shown, **look)
            memory = [row["extra_memory_mib"] * 1024 / row["tokens"] for row in points]
            memory_axis.plot(tokens, memory, style, **look)
    for axis, title in ((time_axis, "time per token (ns)"), (memory_axis, "memory per token beyond inputs (KiB)")):
        axis.set(yscale="log", xlabel="tokens in the sequence", title=title)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    time_axis.plot([], [], "k-", label="forward")
    time_axis.plot([], [], "k--", label="forward + backward")
    time_axis.legend(fontsize=8)
    figure.suptitle(f"One attention layer of the Llama-3-8B shape, {report['provenance']['device']}, bfloat16")
    return figure


def decode(report: dict[str, Any]) -> Figure:
    """Throughput and memory over batch sizes, latency over positions, prefill over lengths."""
    settings = report["settings"]
    sections = {name: section["rows"] for name, section in report["sections"].items()}
    batches = sections.get("throughput", []) + sections.get("softmax", [])
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"{settings['model']} shape, {settings['dtype']}, {report['provenance']['device']}")
    run_of = f"{settings['prompt_tokens']}-token prompts, {settings['new_tokens']} new tokens"
    panels = (
        (f"Throughput: {run_of}", batches, "batch", "sequences (batch size)", "tokens_per_s", "new tokens/s"),
        (f"Peak memory: {run_of}", batches, "batch", "sequences (batch size)", "peak_gib", "GiB"),
        ("Latency of a token, one sequence", sections.get("latency", []), "position", "position", "step_ms", "ms"),
        ("Prefill of one prompt", sections.get("prefill", []), "tokens", "prompt tokens", "seconds", "s"),
    )
    for axis, (title, rows, x, x_label, y, y_label) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        ticks = set()
        for system, (name, color, marker) in SYSTEMS.items():
            own = [row for row in rows if row["system"] == system]
            points = sorted((row[x], row[y]) for row in own if row.get(y) is not None)
            axis.plot([a for a, _ in points], [b for _, b in points], color=color, marker=marker, label=name)
            if y == "tokens_per_s":
                floor = sorted((row[x], row["floor_tokens_per_s"]) for row in own if "floor_tokens_per_s" in row)
                label = f"{name}: what bandwidth and matmuls allow"
                axis.plot([a for a, _ in floor], [b for _, b in floor], ":", color=color, label=label)
            full = [row[x] for row in own if row.get("error") == "out of memory"]
            place = {"transform": axis.get_xaxis_transform(), "clip_on": False, "linestyle": "none"}
            if full:
                axis.plot(full, [0.97] * len(full), marker="x", markersize=10, color=color, **place)
            ticks |= {a for a, _ in points} | set(full)
        axis.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(sorted(ticks), [f"{tick:,}" for tick in sorted(ticks)], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


MOST = 32.0  # perplexity that the axis shows; higher ones stand at its edge, with their numbers


def recall(rows: list[dict[str, Any]]) -> Figure:
    """What a sequence's cache buys: recall and perplexity of each run of `lolcats sweep hybrid`, against its size."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle("SmolLM2-135M, the same LoRA and data but where it says otherwise; a point is a seed", fontsize=10)
    recall_axis, perplexity_axis = figure.subplots(1, 2)
    rows = [row for row in rows if row["status"] == "finished" and (row["evaluation"] or {}).get("recall")]
    rows = [row for row in rows if "passkeys" not in row["case"]["method"]]  # trained on these alone
    for number, (method, size) in enumerate(dict.fromkeys((row["case"]["method"], _mib(row)) for row in rows)):
        own = [row for row in rows if (row["case"]["method"], _mib(row)) == (method, size)]
        name = f"{method} of the heads exact" if method.endswith("%") else method.replace("%,", "% exact,")
        look = {
            "color": colormaps["tab20"](2 * number % 20 + number // 10),
            "marker": "s" if method.startswith("softmax") else "oD"[number // 20 % 2],
            "label": f"{name} ({size:.0f} MiB)",
        }
        recall_axis.scatter([size] * len(own), [share([row], "needles", ALL) for row in own], **look)
        measured = [row["held_out"]["encyclopedia"] for row in own if row["held_out"]]
        perplexity_axis.scatter([size] * len(measured), [min(value, MOST) for value in measured], **look)
        for value in measured:
            if value > MOST:
                perplexity_axis.annotate(f"{value:.0f} \u2191", (size, MOST), (8, -3), textcoords="offset points")
    titles = ("one of four facts, 1k to 8k tokens (% found)", "perplexity of Wikipedia, 4096 tokens")
    for axis, title in zip((recall_axis, perplexity_axis), titles, strict=True):
        axis.set(xscale="log", xlabel="cache of a sequence of 8192 tokens (MiB)", title=title)
        axis.set_xticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    recall_axis.set_ylim(0, 100)
    figure.legend(*recall_axis.get_legend_handles_labels(), fontsize=6, loc="outside right upper")
    return figure


def _mib(row: dict[str, Any]) -> float:
    """Size of the cache."""
    return row["cache"]["bytes"] / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="several files: rows of a sweep, one after the other")
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in given.json]
    if given.json[0].suffix == ".jsonl":
        figure = recall([json.loads(line) for text in texts for line in text.splitlines()])
    else:
        report = json.loads(texts[0])
        figure = decode(report) if "sections" in report else attention(report)
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.picture, dpi=130)


if __name__ == "__main__":
    main()

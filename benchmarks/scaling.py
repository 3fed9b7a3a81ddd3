"""Both stages, export and serving of 405B and 70B shapes over several GPUs: what the plan says, and what is measured.

    python benchmarks/scaling.py --gpus 8 --plan-only
    python benchmarks/scaling.py --gpus 8 --json scaling_8gpu.json
    python benchmarks/scaling.py --gpus 8 --json scaling_8gpu.json --only "70b*" --retry

Every row has processes of its own (scaling_row.py under torchrun, vllm_gpu.py) and random weights. One that fails, runs
out of memory or takes too long is recorded as that, and the next one runs. The file is written after each row; the same
command resumes with the rows that it lacks, so that several visits of --seconds do. What the plan says cannot fit is
not tried.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from bench_tools import check_shape, saver
from scaling_plan import PROMPT, TOKENS, Row, all_rows, label, planned
from scaling_row import RowBench

from lolcats.errors import UserError
from lolcats.plan.gpus import GB, GPUS, Gpu, find_gpu

FOLDER = Path(__file__).parent
PINNED = 1.5  # host memory of offloaded weights: pinned buffers are rounded up
LEAST_S = 90.0  # a row is not begun with less time than this
STOP_S = 40.0  # for torchrun to end its processes
UNITS = {
    "gb": "{:.1f} GB",
    "tokens_per_second": "{:,.0f} tokens/s",
    "hours": "{:.2f} h",
    "seconds": "{:,.0f} s",
    "prefill_tokens_per_second": "prompts {:,.0f} tokens/s",
    "decode_tokens_per_second": "decoding one sequence {:,.0f} tokens/s",
    "decode_many_tokens_per_second": "many {:,.0f} tokens/s",
    "mib_per_sequence": "{:,.1f} MiB a sequence",
    "host_gb": "host {:,.0f} GB",
}


# --- running ------------------------------------------------------------------------------------------------------


def command(row: Row, file: Path, seconds: float, python: str = sys.executable) -> list[str]:
    """What measures the row and writes it to `file`.

    Args:
        python: with vLLM.
    """
    if row.vllm:
        script = [python, str(FOLDER / "vllm_gpu.py"), row.vllm, "--shape", label(row.bench.model)]
        return [*script, "--gpus", str(row.gpus), "--seconds", f"{0.9 * seconds:.0f}", "--output", str(file.parent)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(probe.getsockname()[1])]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(row.gpus), *meeting]
    options = []
    for item in fields(row.bench):
        flag, value = item.name.replace("_", "-"), getattr(row.bench, item.name)
        if isinstance(value, bool) and value != item.default:
            options.append(f"--{flag}" if value else f"--no-{flag}")
        elif value != item.default:
            options += [f"--{flag}", str(value)]
    return [*launcher, str(FOLDER / "scaling_row.py"), *options, "--json", str(file)]


def start(arguments: Sequence[str], file: Path, timeout_s: float) -> dict[str, Any]:
    """What a command wrote to `file`; a failure is a result, too: "error", and "log", the end of what it printed."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        failure = "ended without a result"
        try:
            if status := process.wait(timeout_s):
                failure = f"exit status {status}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {timeout_s:.0f} s"
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()
        with suppress(OSError, ValueError):
            found = json.loads(file.read_text())
            if process.returncode == 0 or "error" in found or found.get("prefill"):  # vllm_gpu.py writes what it has
                return dict(found)
        log.seek(0)
        return {"error": failure, "log": log.read()[-2000:]}


def run(
    rows: Sequence[Row],
    gpu: Gpu,
    report: dict[str, Any],
    keep: Callable[[dict[str, Any]], object],
    *,
    seconds: float,
    row_seconds: float,
    retry: bool = False,
    python: str = sys.executable,
) -> None:
    """Measure the rows that `report["rows"]` lacks, as far as `seconds` reach.

    Args:
        keep: gets the report after each row.
        row_seconds: after which a row is stopped.
        retry: also those that failed.
    """
    end, done = time.monotonic() + seconds, report["rows"]
    for row in rows:
        if "result" in done.get(row.name, {}) or ("error" in done.get(row.name, {}) and not retry):
            continue
        row, plan = planned(row, gpu)
        entry: dict[str, Any] = {"gpus": row.gpus, "planned": plan}
        if (reason := _not_tried(row, plan, done, python)) is not None:
            entry["skipped"] = reason
        else:
            limit_s = min(row_seconds, end - time.monotonic())
            if limit_s < min(LEAST_S, row_seconds):
                print("no time is left; the same command resumes")
                return
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{row.vllm or 'row'}.json"  # as vllm_gpu.py names it
                arguments = command(row, file, limit_s, python)
                found = start(arguments, file, limit_s)
            if limit_s < row_seconds and found.get("error", "").startswith("not done"):
                print(f"{row.name}: stopped by --seconds; the same command resumes")
                return
            entry["command"] = shlex.join(arguments)
            entry |= found if "error" in found else {"result": found}
        done[row.name] = entry
        keep(report)
        print(f"{row.name}: {outcome(entry)}", flush=True)


def _not_tried(row: Row, plan: dict[str, Any], done: dict[str, Any], python: str) -> str | None:
    if plan["missing"]:
        return f"by plan {plan['missing']}"
    if "result" in done.get(row.unless, {}):
        return "all layers were measured"
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # ValueError: "max", there is no limit
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    if (wanted := PINNED * plan.get("host_gb", 0.0)) > size / GB:
        return f"pinned weights need about {wanted:.0f} GB of host memory, of {size / GB:.0f}"
    if row.vllm and subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False).returncode:
        return f"{python} cannot import vllm (--vllm-python)"
    return None


# --- tables -------------------------------------------------------------------------------------------------------


def outcome(entry: dict[str, Any]) -> str:
    """What came of a row, in words; hours are of all layers."""
    found, plan = entry.get("result"), entry["planned"]
    if found is None:
        return str(entry.get("error") or f"not tried: {entry['skipped']}")
    if "prefill" in found or "decode" in found:
        read, decoded = found.get("prefill", []), found.get("decode", [])
        rates = {
            "prefill": [one["tokens_per_s"] for one in read],
            "decode": [one["tokens_per_s"] for one in decoded if one["running"] == 1],
            "decode_many": [one["tokens_per_s"] for one in decoded if one["running"] > 1],
        }
        values = {f"{what}_tokens_per_second": max(each) for what, each in rates.items() if each}
        size = found["state_bytes"] + PROMPT * found["token_bytes"]
        return text(values | {"mib_per_sequence": size / 2**20})
    values = {"gb": max(found["peak_gib"]) * 2**30 / GB} if found["peak_gib"][0] is not None else {}
    if "export_s" in found:
        host_gb = max(found["host_peak_gib"]) * 2**30 / GB
        return text(values | {"seconds": found["export_s"], "host_gb": host_gb})
    rate = found["tokens_per_second"]
    values |= {"tokens_per_second": rate, "hours": TOKENS / rate / 3600}
    if "all_layers_hours" not in plan:
        return text(values)
    # The plan for all layers, times what these took of theirs.
    values["hours"] *= plan["all_layers_hours"] / plan["hours"]
    return f"{text(values)} for all layers, extrapolated"


def text(values: dict[str, Any]) -> str:
    return ", ".join(form.format(values[name]) for name, form in UNITS.items() if name in values)


def table(rows: Sequence[Row], gpu: Gpu, done: dict[str, Any] | None = None) -> str:
    """In Markdown: the plan of each row, and beside it what came of it, unless `done` is None."""
    lines = [["row", "GPUs", "micro-batch", "planned", *([] if done is None else ["measured"])]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        row, plan = planned(row, gpu)
        micro_batch = "" if row.vllm or row.bench.stage == "export" else str(row.bench.micro_batch)
        said = plan | ({"hours": plan["all_layers_hours"]} if "all_layers_hours" in plan else {})
        said = text(said) + (f"; does not fit: {plan['missing']}" if plan["missing"] else "")
        cells = [row.name, str(row.gpus), micro_batch, said]
        if done is not None:
            cells.append(outcome(done[row.name]) if row.name in done else "not run yet")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--plan-only", action="store_true", help="print what is planned; nothing is run")
    parser.add_argument("--json", type=Path, help="results; rows that are in it are not run again")
    parser.add_argument("--only", default="*", help="rows whose name matches this pattern")
    parser.add_argument("--retry", action="store_true", help="also rows that failed before")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this visit")
    parser.add_argument("--row-seconds", type=float, default=420.0, help="after which a row is stopped")
    parser.add_argument("--models", default="llama3-405b,llama3-70b", help="the large and the small one")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--gpu", help="kind to plan for; default: the one that is here, else h200")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--vllm-python", default=sys.executable, help="of an environment with vLLM")
    given = parser.parse_args(arguments)
    large, small = given.models.split(",")
    for model in (large, small):
        check_shape(model)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = [name for name in GPUS if name in here.lower().replace(" ", "-")]
    gpu = find_gpu(given.gpu or max(known, key=len, default="h200"))
    dtype = "bfloat16" if given.device == "cuda" else "float32"
    base = RowBench(tokens=given.tokens, dtype=dtype, device=given.device)
    rows = [row for row in all_rows(given.gpus, base, large, small) if fnmatch.fnmatch(row.name, given.only)]
    if given.plan_only:
        print(table(rows, gpu))
        return
    if given.device == "cuda" and torch.cuda.device_count() < given.gpus:
        raise UserError(f"--gpus {given.gpus}: this machine has {torch.cuda.device_count()}; see --plan-only")
    settings = {"gpus": given.gpus, "gpu": gpu.name, "models": [large, small], "tokens": given.tokens}
    report = {"settings": settings, "rows": {}}
    if given.json is not None and given.json.is_file():
        report = json.loads(given.json.read_text())
        if report["settings"] != settings:
            raise UserError(f"{given.json} has rows of {report['settings']}, wanted are {settings}; name another file")
    keep = saver(given.json)
    keep(report)  # a file that cannot be written shows now
    limits = {"seconds": given.seconds, "row_seconds": given.row_seconds}
    run(rows, gpu, report, keep, **limits, retry=given.retry, python=given.vllm_python)
    print(table(rows, gpu, report["rows"]))


if __name__ == "__main__":
    main()

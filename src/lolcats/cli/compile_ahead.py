"""GPU kernels compiled by other processes, while that of the run imports its libraries and reads its data.

Triton compiles a kernel when it is launched for the first time, one after another, and keeps it on disk. Each of these
processes makes the first calls of one part of the run (`lolcats.training.first_calls`) and ends; the run finds the
kernels on disk. Whatever fails here, or is not finished in time, the run compiles itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from glob import glob
from types import TracebackType

from lolcats.cli.console import hide_unused, imports, prepare_libraries
from lolcats.config import LinearizeConfig

LONGEST_WAIT_S = 60.0
CORES = 4  # with fewer, these processes would take the run's own


class CompileAhead:
    """A process for each part of the run; at the end of a `with` block all are gone.

    Args:
        parts: as `first_calls` knows them.
    """

    def __init__(self, config: LinearizeConfig, parts: list[str]) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for part in parts:
            process = self.processes[part] = subprocess.Popen(
                [sys.executable, "-m", "lolcats.cli.compile_ahead", part],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(config.model_dump_json())

    def wait(self, part: str) -> None:
        """Until the part's kernels are there, or will not come."""
        if part in self.processes:
            with suppress(subprocess.TimeoutExpired):
                self.processes[part].wait(LONGEST_WAIT_S)

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def compile_ahead(config: LinearizeConfig, gpus: str = "/dev/nvidia[0-9]*") -> CompileAhead:
    """Start compiling what the run will need, if there is an NVIDIA GPU that it will use, and cores to spare.

    Args:
        gpus: pattern of the files by which Linux shows NVIDIA's GPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    on_gpu = config.model.device.startswith(("auto", "cuda")) and not hidden and bool(glob(gpus))
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and config.transfer.block_mode == "joint"
    timed = os.environ.get("LOLCATS_AUTOTUNE", "0") == "1"  # which wants the GPU to itself
    begun = "torch" in sys.modules  # in this process another run has compiled them
    if not on_gpu or not alone or timed or begun or config.model.load_in_4bit or (os.cpu_count() or 1) < CORES:
        return CompileAhead(config, [])
    stages = {
        "transfer": config.transfer.enabled and not config.adjust.softmax_control,
        "adjust": config.adjust.enabled,
    }
    return CompileAhead(config, ["perplexity", *(stage for stage, enabled in stages.items() if enabled)])


def is_shared() -> bool:
    """Whether processes may use the machine's GPUs together; where one has them alone, it must be the run's."""
    query = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    try:
        modes = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return set(modes.split()) == {"Default"}


def main() -> None:
    config = LinearizeConfig.model_validate_json(sys.stdin.read())
    if config.model.device != "cpu" and not is_shared():
        return
    prepare_libraries()
    hide_unused()
    with imports():
        from lolcats.training.first_calls import first_calls

    first_calls(config, sys.argv[1])


if __name__ == "__main__":
    main()

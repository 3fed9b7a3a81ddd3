"""Where the time of a decoding step goes."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console

from lolcats.bench.decode_session import DecodeBench, Session
from lolcats.bench.decode_throughput import prefill_prompts, steps_of_block
from lolcats.bench.timing import kernel_times
from lolcats.generation.runner import Runner


def profile_step(bench: DecodeBench, batch: int, console: Console) -> dict[str, float]:
    """Milliseconds of each device kernel in one step of `batch` sequences with full windows, largest first."""
    session = Session(bench, console, lambda report: None)
    model = session.model(bench.model)
    with closing(Runner(model, batch)) as runner:
        prefill_prompts(runner, batch, bench.prompt_tokens, bench.prefill_chunk)
        # full windows, and a block that has just begun: none of the steps that are counted begins one
        block = steps_of_block(model)
        runner.decode_greedy(batch, steps=2 * block - bench.prompt_tokens % block + 1)
        return kernel_times(lambda: runner.decode_greedy(batch), session.device)

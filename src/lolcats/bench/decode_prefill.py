"""Reading one long prompt: the linearized model in chunks, the softmax model in one forward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from lolcats.bench.decode_session import Session, describe
from lolcats.bench.decode_softmax import original_attention
from lolcats.bench.timing import free, memory_gib, synchronize
from lolcats.generation.runner import Runner
from lolcats.modeling.call import SOFTMAX
from lolcats.modeling.model import LolcatsForCausalLM

MAX_RUNS = 4


def prefill(session: Session) -> None:
    """Seconds from a prompt to its state (or cache) and the logits after its last token."""
    model = session.model(session.bench.model)
    for length in session.bench.prefill_lengths:
        for system in ("lolcats", "softmax"):
            row: dict[str, Any] = {"system": system, "tokens": length}
            line = f"prefill, {system}, {length:,} tokens:"
            if session.out_of_time(row, line):
                continue
            free(session.device)
            try:
                if system == "lolcats":
                    row |= _linear_row(session, model, length)
                else:
                    row |= _softmax_row(session, model, length)
            except Exception as error:
                row["error"] = describe(error)
            session.record(row, _line(line, row))
    free(session.device)


def _linear_row(session: Session, model: LolcatsForCausalLM, length: int) -> dict[str, Any]:
    chunk = session.bench.prefill_chunk
    tokens = _random_tokens(model, length).tolist()
    with closing(Runner(model, 1, use_graphs=False)) as runner:

        def read() -> None:
            runner.clear(0)
            for begin in range(0, length, chunk):
                runner.prefill([0], [tokens[begin : begin + chunk]])

        return _timed(read, session, length) | {"chunk": min(chunk, length)}


@torch.no_grad()
def _softmax_row(session: Session, model: LolcatsForCausalLM, length: int) -> dict[str, Any]:
    token_1T = _random_tokens(model, length)[None].to(session.device)
    with original_attention(model) as base:

        def read() -> None:
            base(input_ids=token_1T, use_cache=True, logits_to_keep=1, attention_call=SOFTMAX)

        return _timed(read, session, length)


def _random_tokens(model: LolcatsForCausalLM, count: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))


def _timed(call: Callable[[], object], session: Session, length: int) -> dict[str, Any]:
    """Median of the runs after the first, while time is left; else the first, which may hold compilation."""
    samples_s: list[float] = []
    while not samples_s or (
        # A second run, if it fits; more, if they are short.
        len(samples_s) < MAX_RUNS and samples_s[-1] < session.left_s / (1.5 if len(samples_s) == 1 else 10)
    ):
        synchronize(session.device)
        began_s = time.perf_counter()
        call()
        synchronize(session.device)
        samples_s.append(time.perf_counter() - began_s)
    seconds = statistics.median(samples_s[1:] or samples_s)
    return {
        "seconds": seconds,
        "tokens_per_s": length / seconds,
        "runs": max(len(samples_s) - 1, 1),
        "warm": len(samples_s) > 1,
        **memory_gib(session.device),
    }


def _line(head: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return head
    line = f"{head} {row['seconds']:.3f} s, {row['tokens_per_s']:,.0f} tokens/s"
    return line if row["peak_gib"] is None else f"{line}, peak {row['peak_gib']:.1f} GiB"

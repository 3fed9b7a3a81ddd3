"""Tokens per second of many sequences: 128-token prompts, 4096 new tokens, over batch sizes.

A linearized step costs the same at every position, so whole blocks of steps stand for all; the softmax
model's step grows with its context, so it is timed at several lengths, and the times are integrated.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import torch

from lolcats.bench.decode_floor import linear_work, softmax_work
from lolcats.bench.decode_session import Session, describe, spread
from lolcats.bench.decode_softmax import SoftmaxDecoder, mean_over_run, original_attention
from lolcats.bench.timing import free, memory_gib, step_samples, synchronize
from lolcats.generation.runner import Runner
from lolcats.modeling.model import LolcatsForCausalLM

STATE_LIMIT_MIB = {"llama3-8b": 34.0}  # of a sequence: what the shape may take


def throughput(session: Session) -> None:
    """The linearized model; one row a batch size."""
    model = session.model(session.bench.model)
    work = linear_work(model)
    for batch in session.bench.batches:
        row: dict[str, Any] = {"system": "lolcats", "batch": batch}
        line = f"lolcats, batch {batch}:"
        if session.out_of_time(row, line):
            continue
        free(session.device)
        try:
            row |= _linear_row(session, model, batch) | work.floor(batch, session.limits)
            row["share_of_floor"] = row["floor_ms"] / row["step_ms"]
        except Exception as error:
            row["error"] = describe(error)
        session.record(row, _line(line, row))
    free(session.device)


def softmax(session: Session) -> None:
    """The original model; one row a batch size, none after the first that does not fit."""
    bench, failed = session.bench, None
    with original_attention(session.model(bench.model)) as base:
        for batch in bench.softmax_batches:
            row: dict[str, Any] = {"system": "softmax", "batch": batch}
            line = f"softmax, batch {batch}:"
            if failed is not None:
                row["error"] = f"not tried: batch {failed} ran out of memory"
            elif session.out_of_time(row, line):
                continue
            else:
                free(session.device)
                try:
                    row |= _softmax_row(session, base, batch)
                except Exception as error:
                    row["error"] = describe(error)
                    failed = batch if row["error"] == "out of memory" else None
            session.record(row, _line(line, row))
    free(session.device)


def prefill_prompts(runner: Runner, count: int, tokens: int, pass_tokens: int) -> float:
    """Empty all slots and read `count` random prompts into the first, some at a time; returns seconds of reading.

    `runner.token_S` holds the first new tokens afterwards.
    """
    vocabulary = runner.model.config.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (count, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    together = max(1, pass_tokens // tokens)
    set_position(runner, 0)
    for layer in runner.cache.layers:
        for tensor in layer.store.tensors().values():
            tensor.zero_()
    synchronize(runner.device)
    began_s = time.perf_counter()
    for begin in range(0, count, together):
        rows = list(range(begin, min(begin + together, count)))
        logits_BV = runner.prefill(rows, [prompts[row] for row in rows])
        runner.token_S[begin : begin + len(rows)] = logits_BV.argmax(-1)
    synchronize(runner.device)
    return time.perf_counter() - began_s


def set_position(runner: Runner, position: int) -> None:
    """Tell all states that they are at `position`; nothing else changes in them."""
    for layer in runner.cache.layers:
        layer.store.position.fill_(position)
    runner.length_S.fill_(position)
    runner.lengths = [position] * len(runner.lengths)


def steps_of_block(model: LolcatsForCausalLM) -> int:
    """Steps after which the work repeats: the terraced window folds once a block."""
    spec = model.config.attention
    return max(spec.window_size, 1) if spec.window == "terraced" else 64


def _linear_row(session: Session, model: LolcatsForCausalLM, batch: int) -> dict[str, Any]:
    with closing(Runner(model, batch)) as runner:
        return _measure(session, runner, batch)


def _measure(session: Session, runner: Runner, batch: int) -> dict[str, Any]:
    bench, device, model = session.bench, session.device, runner.model
    prefill_prompts(runner, min(batch, max(1, bench.prefill_chunk // bench.prompt_tokens)), bench.prompt_tokens, 10**9)
    prefill_s = prefill_prompts(runner, batch, bench.prompt_tokens, bench.prefill_chunk)
    # Compiles and captures; with a sparse cache, also the step that folds a block.
    runner.decode_greedy(batch, steps=steps_of_block(model) if model.config.attention.sparse_cache else 3)
    samples_ms = step_samples(lambda: runner.decode_greedy(batch), steps_of_block(model), device)
    for _ in range(bench.blocks - 1):
        if session.left_s < sum(samples_ms) / 1e3:
            break
        samples_ms += step_samples(lambda: runner.decode_greedy(batch), steps_of_block(model), device)
    memory = memory_gib(device)
    logits_BV = runner.decode_greedy(batch)
    step = spread(samples_ms)
    run_s = prefill_s + bench.new_tokens * step["step_ms"] / 1e3
    row = {
        **step,
        "tokens_per_s": batch / step["step_ms"] * 1e3,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": batch * bench.prompt_tokens / prefill_s,
        "run_s_extrapolated": run_s,
        "run_tokens_per_s_extrapolated": batch * bench.new_tokens / run_s,
        "state_mib_per_sequence": runner.bytes_per_slot / 2**20,
        "cuda_graphs": runner.graphs is not None and runner.graphs.works,
        "finite": bool(logits_BV.isfinite().all()),
        **memory,
    }
    if bench.model in STATE_LIMIT_MIB:
        row["state_within_limit"] = row["state_mib_per_sequence"] <= STATE_LIMIT_MIB[bench.model]
    if batch == bench.full_run_batch:
        if run_s > session.left_s:
            row["full_run_error"] = f"would take {run_s:.0f} s, {session.left_s:.0f} s are left; raise --seconds"
        else:
            row |= _full_run(session, runner, batch)
    return row


def _full_run(session: Session, runner: Runner, batch: int) -> dict[str, Any]:
    """The whole run, with a wall clock."""
    bench, device = session.bench, session.device
    prefill_s = prefill_prompts(runner, batch, bench.prompt_tokens, bench.prefill_chunk)
    began_s = time.perf_counter()
    runner.decode_greedy(batch, steps=bench.new_tokens)
    synchronize(device)
    decode_s = time.perf_counter() - began_s
    return {
        "run_s": prefill_s + decode_s,
        "run_tokens_per_s": batch * bench.new_tokens / (prefill_s + decode_s),
        "run_decode_tokens_per_s": batch * bench.new_tokens / decode_s,
        "run_tokens_per_sequence": runner.lengths[0],
    }


def _softmax_row(session: Session, base: Any, batch: int) -> dict[str, Any]:
    bench, device = session.bench, session.device
    last = bench.prompt_tokens + bench.new_tokens - bench.softmax_steps - 2
    contexts = [
        round(bench.prompt_tokens + (last - bench.prompt_tokens) * part / max(bench.contexts - 1, 1))
        for part in range(bench.contexts)
    ]
    found: dict[int, float] = {}
    memory: dict[str, float | None] = {}
    for context in reversed(contexts):  # the longest decides whether it fits
        if found and session.left_s < 0 and context != contexts[0]:
            continue
        decoder = SoftmaxDecoder(base, batch, context)
        for _ in range(2):
            decoder.step()
        # The median: allocations of the first steps are no part of it.
        found[context] = spread(step_samples(decoder.step, bench.softmax_steps, device))["step_ms_median"]
        memory = memory or memory_gib(device)
        del decoder
        free(device)
    measured = sorted(found)
    step_ms = mean_over_run(measured, [found[context] for context in measured])
    mean_context = bench.prompt_tokens + bench.new_tokens / 2
    row: dict[str, Any] = {
        "step_ms": step_ms,
        "step_ms_at_context": {str(context): found[context] for context in measured},
        "tokens_per_s": batch / step_ms * 1e3,
        "run_s_extrapolated": bench.new_tokens * step_ms / 1e3,
        **memory,
        **softmax_work(session.model(bench.model), mean_context).floor(batch, session.limits),
    }
    return row | {"share_of_floor": row["floor_ms"] / step_ms}


def _line(head: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return head
    line = f"{head} {row['tokens_per_s']:,.0f} tokens/s, {row['step_ms']:.2f} ms/step (floor {row['floor_ms']:.2f})"
    if row["peak_gib"] is not None:
        line += f", peak {row['peak_gib']:.1f} GiB"
    if "state_mib_per_sequence" in row:
        line += f", state {row['state_mib_per_sequence']:.2f} MiB, prefill {row['prefill_s']:.2f} s"
        line += "" if row["finite"] else ", NOT FINITE"
    if "run_s" in row:
        line += f"; whole run {row['run_s']:.1f} s, extrapolated {row['run_s_extrapolated']:.1f} s"
    return line + (f"; whole run: {row['full_run_error']}" if "full_run_error" in row else "")

"""One sequence: time of a token far into the sequence, and over a very long run."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import torch

from lolcats.bench.decode_session import Session, describe, spread
from lolcats.bench.decode_softmax import SoftmaxDecoder, original_attention
from lolcats.bench.decode_throughput import prefill_prompts, set_position, steps_of_block
from lolcats.bench.timing import free, memory_gib, step_samples
from lolcats.generation.runner import Runner


def latency(session: Session) -> None:
    """Milliseconds of a token of one sequence at several positions, linearized and softmax."""
    free(session.device)
    _linear_rows(session)
    with original_attention(session.model(session.bench.model)) as base:
        for position in session.bench.positions:
            row: dict[str, Any] = {"system": "softmax", "position": position, "position_set": True}
            if session.out_of_time(row, f"softmax at {position:,}:"):
                continue
            free(session.device)
            try:
                row |= _softmax_row(session, base, position)
            except Exception as error:
                row["error"] = describe(error)
            session.record(row, _line(row))
    free(session.device)


def _linear_rows(session: Session) -> None:
    bench, device = session.bench, session.device
    model = session.model(bench.model)
    with closing(Runner(model, 1)) as runner:
        prefill_prompts(runner, 1, bench.prompt_tokens, bench.prefill_chunk)
        runner.decode_greedy(1, steps=max(3, model.config.attention.capacity))  # a full window
        for position in bench.positions:
            row: dict[str, Any] = {"system": "lolcats", "position": position, "position_set": True}
            if session.out_of_time(row, f"lolcats at {position:,}:"):
                continue
            set_position(runner, position)
            try:
                samples_ms = step_samples(lambda: runner.decode_greedy(1), bench.blocks * steps_of_block(model), device)
                row |= spread(samples_ms) | memory_gib(device) | {"state_mib": runner.bytes_per_slot / 2**20}
            except Exception as error:
                row["error"] = describe(error)
            session.record(row, _line(row))


def endurance(session: Session) -> None:
    """One sequence decoding on and on: memory and time at the start and at the end."""
    bench, device = session.bench, session.device
    if bench.endurance_tokens == 0:
        return
    model = session.model(bench.endurance_model, bench.endurance_layers)
    free(device)
    with closing(Runner(model, 1)) as runner:
        _endure(session, runner)


def _endure(session: Session, runner: Runner) -> None:
    bench, device, model = session.bench, session.device, runner.model
    prefill_prompts(runner, 1, bench.prompt_tokens, bench.prefill_chunk)
    runner.decode_greedy(1, steps=steps_of_block(model))
    chunk_s: list[float] = []
    finite = True
    first = last = _allocated(device)
    began_s = time.perf_counter()
    while len(chunk_s) * bench.endurance_chunk < bench.endurance_tokens:
        chunk_began_s = time.perf_counter()
        logits_BV = runner.decode_greedy(1, steps=bench.endurance_chunk)
        finite = bool(logits_BV.isfinite().all()) and finite  # waits for the device
        chunk_s.append(time.perf_counter() - chunk_began_s)
        last = _allocated(device)
        first = last if len(chunk_s) == 1 else first
        if session.left_s < chunk_s[-1]:
            break
        if len(chunk_s) % 10 == 0:
            session.say(f"endurance: {len(chunk_s) * bench.endurance_chunk:,} tokens")
    chunk_ms = [1e3 * second / bench.endurance_chunk for second in chunk_s]
    row = {
        "system": "lolcats",
        "model": bench.endurance_model,
        "layers": model.config.text_config.num_hidden_layers,
        "tokens": len(chunk_s) * bench.endurance_chunk,
        "tokens_wanted": bench.endurance_tokens,
        "stopped_by_time": len(chunk_s) * bench.endurance_chunk < bench.endurance_tokens,
        "position": runner.lengths[0],
        "seconds": time.perf_counter() - began_s,
        "steps_of_chunk": bench.endurance_chunk,
        "first_chunk_ms": chunk_ms[0],
        "last_chunk_ms": chunk_ms[-1],
        "slowest_chunk_ms": max(chunk_ms),
        "allocated_bytes_first": first,
        "allocated_bytes_last": last,
        "cuda_graphs": runner.graphs is not None and runner.graphs.works,
        "finite": finite,
        **memory_gib(device),
    }
    what = f"endurance, {row['model']}, {row['layers']} layers: {row['tokens']:,} tokens"
    line = f"{what}, first {chunk_ms[0]:.3f} and last {chunk_ms[-1]:.3f}"
    session.record(row, f"{line} ms/token, allocated {first} and {last} bytes, finite: {finite}")


def _softmax_row(session: Session, base: Any, position: int) -> dict[str, Any]:
    decoder = SoftmaxDecoder(base, 1, position)
    for _ in range(2):
        decoder.step()
    samples_ms = step_samples(decoder.step, 2 * session.bench.softmax_steps, session.device)
    layers: Any = decoder.cache.layers
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return spread(samples_ms) | memory_gib(session.device) | {"state_mib": cache_bytes / 2**20}


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _line(row: dict[str, Any]) -> str:
    head = f"{row['system']} at {row['position']:,}:"
    if "error" in row:
        return head
    return f"{head} {row['step_ms']:.3f} ms/token (median {row['step_ms_median']:.3f}), {row['state_mib']:,.1f} MiB"

"""Decoding speed and memory of a linearized model, against softmax in the same engine.

python benchmarks/decode.py --model llama3-8b --json benchmarks/results/decode_h200.json
python benchmarks/decode.py --model smollm2-135m --sections prefill
python benchmarks/decode.py --sections throughput,softmax_engine --exact '["0.3", "4.1", "9"]' --prompt-tokens 8192 \
    --new-tokens 256 --no-read-prompts --batches 64,256
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from bench_tools import (
    check_shape,
    describe,
    free,
    main,
    memory_gib,
    random_model,
    random_original,
    settings_json,
    spread,
    step_samples,
    synchronize,
)
from rich.console import Console
from rich.table import Table
from verify import verify_shape

from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.generation.runner import Runner
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance

# throughput: many sequences, linearized; softmax_engine: the same with all heads exact; prefill: prompts, both.
SECTIONS = ("throughput", "prefill", "softmax_engine")
KEYS = dict.fromkeys(SECTIONS, "batch") | {"prefill": "tokens"}
COLUMNS = {  # of tables and progress: number -> its format
    "tokens_per_s": ",.0f",
    "step_ms": ".3f",
    "step_ms_median": ".3f",
    "step_ms_p90": ".3f",
    "seconds": ".3f",
    "state_mib_per_sequence": ".2f",
    "peak_gib": ".1f",
    "prefill_tokens_per_s": ",.0f",
    "finite": "",
    "error": "",
}
NOTES = {
    "weights": "random, of the named shape; times do not depend on their values",
    "throughput": "real prompts are read; steps are greedy, tokens stay on the device; step_ms is the mean over whole"
    " blocks; without read_prompts, one prompt is read and its slot copied to all",
}
PREFILL_TURNS, RUNS_IN_TURN = 5, 4  # of calls that take less than a second; else one
_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class DecodeBench:
    """What to measure."""

    model: str = "llama3-8b" if _GPU else "tiny"
    sections: tuple[str, ...] = SECTIONS
    batches: tuple[int, ...] = (1, 16, 64, 256, 512, 1024, 2048) if _GPU else (1, 2)
    softmax_batches: tuple[int, ...] = (1, 16, 64) if _GPU else (1, 2)
    prompt_tokens: int = 128
    read_prompts: bool = True  # of all sequences; else of one, which all others copy
    new_tokens: int = 4096  # for which a sequence has room
    blocks: int = 2  # terraced blocks over which steps are timed
    prefill_lengths: tuple[int, ...] = (256, 1024, 4096, 16384, 131072) if _GPU else (256, 1024)
    answer_tokens: int = 1  # of generate()
    prefill_chunk: int = 8192 if _GPU else 256  # tokens of one forward pass, over all its sequences
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    dtype: str = "bfloat16" if _GPU else "float32"
    device: str = "cuda" if _GPU else "cpu"


class Session:
    """One run: the model, and the rows found so far.

    Args:
        keep: called after every row, for instance to write the report to a file.
    """

    def __init__(self, bench: DecodeBench, console: Console, keep: Callable[[dict[str, Any]], object]) -> None:
        self.bench, self.console, self.keep = bench, console, keep
        self.device = torch.device(bench.device)
        self.report: dict[str, Any] = {}
        self.section = ""
        self._began_s = time.perf_counter()
        self._model: tuple[str, LolcatsForCausalLM] | None = None

    def model(self, heads: str = "chosen") -> LolcatsForCausalLM:
        """The model; the one before is dropped.

        Args:
            heads: exact are those of the settings (chosen), none (linear) or all (exact).
        """
        bench = self.bench
        if not bench.attention.exact and heads == "chosen":
            heads = "linear"
        if self._model is None or self._model[0] != heads:
            self._model = None
            free(self.device)
            model = random_model(
                bench.model,
                bench.attention if heads == "chosen" else replace(bench.attention, exact=()),
                tokens=bench.prompt_tokens + bench.new_tokens,
                dtype=bench.dtype,
                device=bench.device,
            )
            if heads == "exact":
                model.set_exact({layer.index: range(layer.num_kv_heads) for layer in model.config.layer_heads})
            self._model = heads, model
        return self._model[1]

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    def measure(self, row: dict[str, Any], found: Callable[[], dict[str, Any]]) -> None:
        """Add a row with what is `found`, or with the reason why nothing is."""
        free(self.device)
        try:
            row |= found()
        except Exception as error:  # the other rows are still worth something
            row["error"] = describe(error)
        self.report["sections"][self.section]["rows"].append(row)
        shown = ", ".join(f"{name} {cell}" for name, cell in _cells(row).items())
        key = KEYS[self.section]
        self.say(f"{self.section}, {row['system']}, {key} {row.get(key, '')}: {shown}")
        self.keep(self.report)

    def say(self, line: str) -> None:
        self.console.print(f"{self.elapsed_s:6.1f} s  {line}", highlight=False, markup=False, soft_wrap=True)


def run(
    bench: DecodeBench, console: Console, keep: Callable[[dict[str, Any]], object] = lambda report: None
) -> dict[str, Any]:
    """Measure section after section; what cannot run says why.

    Args:
        keep: gets the report after every row, so that an interrupted run loses nothing.
    """
    _check(bench)
    session = Session(bench, console, keep)
    errors = verify_shape(bench.model, bench.attention, ("state", "step"), bench.dtype, bench.device)
    origin = {"provenance": provenance(), "notes": NOTES, "relative_errors": errors}
    session.report |= {"settings": settings_json(bench), **origin, "sections": {}}
    keep(session.report)  # a file that cannot be written shows now
    for name in bench.sections:
        began_s, session.section = session.elapsed_s, name
        section: dict[str, Any] = {"rows": []}
        session.report["sections"][name] = section
        try:
            RUN[name](session)
        except Exception as error:  # the other sections are still worth something
            section["error"] = describe(error)
            session.say(f"{name}: {section['error']}")
        section["seconds"] = session.elapsed_s - began_s
        free(session.device)
        keep(session.report)
    session.report["seconds"] = session.elapsed_s
    keep(session.report)
    return session.report


def _check(bench: DecodeBench) -> None:
    check_shape(bench.model)
    unknown = [name for name in bench.sections if name not in SECTIONS]
    if unknown:
        raise UserError(f"no section named {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    numbers = (*bench.batches, *bench.softmax_batches, *bench.prefill_lengths)
    if min((bench.prompt_tokens, bench.prefill_chunk, bench.blocks, bench.new_tokens, *numbers)) < 1:
        raise UserError("batch sizes, lengths and numbers of tokens must be at least 1")


def print_table(report: dict[str, Any], console: Console) -> None:
    """One table a section."""
    settings = report["settings"]
    for name, section in report["sections"].items():
        shown = [column for column in COLUMNS if any(row.get(column) is not None for row in section["rows"])]
        title = f"{name}, {settings['model']}, {settings['dtype']}, {report['provenance']['device']}"
        table = Table("system", KEYS[name], *shown, title=title)
        for row in section["rows"]:
            cells = _cells(row)
            table.add_row(row["system"], f"{row.get(KEYS[name], 0):,}", *(cells.get(column, "-") for column in shown))
        console.print(table)
        if "error" in section:
            console.print(f"{name}: {section['error']}", highlight=False, markup=False)


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {name: format(row[name], form) for name, form in COLUMNS.items() if row.get(name) is not None}


# --- many sequences -----------------------------------------------------------------------------------------------


def throughput(session: Session) -> None:
    """The linearized model. Whole blocks of steps stand for all: without exact heads, one costs the same everywhere."""
    model = session.model()
    for batch in session.bench.batches:
        session.measure({"system": "lolcats", "batch": batch}, partial(_steps_of_many, session, model, batch))


def softmax_engine(session: Session) -> None:
    """All heads exact, in the same engine."""
    model = session.model(heads="exact")
    for batch in session.bench.softmax_batches:
        session.measure({"system": "softmax engine", "batch": batch}, partial(_steps_of_many, session, model, batch))


def _runner_of_many(bench: DecodeBench, model: LolcatsForCausalLM, batch: int) -> Runner:
    steps = max(bench.new_tokens, (bench.blocks + 1) * steps_of_block(model) + 2)
    return Runner(model, batch, bench.prompt_tokens + steps)


def greedy_step(runner: Runner, token_B: torch.Tensor) -> torch.Tensor:
    """Feed each slot its token, which the likeliest next one replaces; returns the logits."""
    logits_BV = runner.decode(token_B)
    token_B.copy_(logits_BV.argmax(-1))
    return logits_BV


def _steps_of_many(session: Session, model: LolcatsForCausalLM, batch: int) -> dict[str, Any]:
    bench, device = session.bench, session.device
    with closing(_runner_of_many(bench, model, batch)) as runner:
        prefill_s = None
        first = min(bench.prompt_tokens, 2 * bench.prefill_chunk) if bench.read_prompts else bench.prompt_tokens
        prefill_prompts(runner, min(batch, max(1, bench.prefill_chunk // first)), first, bench.prefill_chunk)
        if bench.read_prompts:
            prefill_s = prefill_prompts(runner, batch, bench.prompt_tokens, bench.prefill_chunk)
        else:
            copy_first_slot(runner)
        step = partial(greedy_step, runner, torch.zeros(batch, dtype=torch.int64, device=device))
        step_samples(step, 3, device)  # compiles and captures
        times = spread(step_samples(step, bench.blocks * steps_of_block(model), device))
        return {
            **times,
            "tokens_per_s": batch / times["step_ms"] * 1e3,
            "prefill_s": prefill_s,
            "prefill_tokens_per_s": None if prefill_s is None else batch * bench.prompt_tokens / prefill_s,
            "state_mib_per_sequence": runner.cache.nbytes / len(runner.cache.lengths) / 2**20,
            "cuda_graphs": runner.graphs is not None and runner.graphs.works,
            "compiled": runner.compiled.works,
            **memory_gib(device),
            "finite": bool(step().isfinite().all()),
        }


@torch.no_grad()
def prefill(session: Session) -> None:
    """Seconds from one prompt to its state (or cache) and the logits after its last token, or by `generate()` to the
    first new token.
    """
    bench, chunk = session.bench, session.bench.prefill_chunk
    vocabulary = session.model().config.get_text_config().vocab_size

    def runner(heads: str, token_1T: torch.Tensor) -> dict[str, Any]:
        tokens = token_1T[0].tolist()
        with closing(Runner(session.model(heads), 1, len(tokens))) as runner:

            def read() -> None:
                runner.cache.clear(0)
                for begin in range(0, len(tokens), chunk):
                    runner.prefill([0], [tokens[begin : begin + chunk]])

            (row,) = _in_turn({heads: lambda _: read()}, session, token_1T).values()
            return row() | {"chunk": min(chunk, len(tokens))}

    answer: dict[str, Any] = dict.fromkeys(("max_new_tokens", "min_new_tokens"), bench.answer_tokens)
    answer |= {"do_sample": False, "pad_token_id": 0}

    def generated(token_1T: torch.Tensor) -> None:
        session.model().generate(token_1T, **answer)

    sizes = {"tokens": max(bench.prefill_lengths) + bench.answer_tokens, "dtype": bench.dtype, "device": bench.device}
    base = random_original(bench.model, **sizes)

    def original(token_1T: torch.Tensor) -> None:
        base(input_ids=token_1T, use_cache=True, logits_to_keep=1)

    def original_generated(token_1T: torch.Tensor, **cache: str) -> None:
        base.generate(token_1T, **answer, **cache)

    engines = {"lolcats": "chosen", "all linear": "linear"} if bench.attention.exact else {"lolcats": "chosen"}
    compiled = partial(original_generated, cache_implementation="static")  # whose steps transformers compiles
    calls: dict[str, Callable[[torch.Tensor], object]] = {"lolcats generate()": generated, "softmax": original}
    calls |= {"softmax generate()": original_generated}
    calls |= {"softmax generate(), static cache": compiled} if bench.answer_tokens > 1 else {}
    for length in bench.prefill_lengths:
        token_1T = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
        token_1T = token_1T.to(session.device)
        for system, heads in engines.items():
            session.measure({"system": system, "tokens": length}, partial(runner, heads, token_1T))
        for system, found in _in_turn(calls, session, token_1T).items():
            session.measure({"system": system, "tokens": length}, found)


def _in_turn(
    calls: dict[str, Callable[[torch.Tensor], object]], session: Session, token_1T: torch.Tensor
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What each call's row gets, or the error that it raises: some runs of each in turn, again and again.

    Calls that wait for the host take up to a half longer at one time than at another.
    """
    samples_s: dict[str, list[float]] = {name: [] for name in calls}
    memory: dict[str, dict[str, Any]] = {}
    errors: dict[str, Exception] = {}
    for turn in range(PREFILL_TURNS):
        for name, call in calls.items():
            if name in errors or (samples_s[name] and samples_s[name][-1] >= 3.0):
                continue
            if turn == 0:
                free(session.device)
            try:
                first_s = _seconds(partial(call, token_1T), session)
                memory.setdefault(name, memory_gib(session.device))
                for _ in range(RUNS_IN_TURN if first_s < 1.0 else 1):
                    samples_s[name].append(_seconds(partial(call, token_1T), session))
            except Exception as error:  # the other systems are still worth something
                errors[name] = error

    def row(name: str) -> dict[str, Any]:
        if name in errors:
            raise errors[name]
        seconds = statistics.median(samples_s[name])
        return {
            "seconds": seconds,
            "tokens_per_s": token_1T.shape[1] / seconds,
            "runs": len(samples_s[name]),
            "least_seconds": min(samples_s[name]),
            **memory[name],
        }

    return {name: partial(row, name) for name in calls}


def _seconds(call: Callable[[], object], session: Session) -> float:
    synchronize(session.device)
    began_s = time.perf_counter()
    call()
    synchronize(session.device)
    return time.perf_counter() - began_s


RUN: dict[str, Callable[[Session], None]] = {
    "throughput": throughput,
    "prefill": prefill,
    "softmax_engine": softmax_engine,
}


# --- slots --------------------------------------------------------------------------------------------------------


def prefill_prompts(runner: Runner, count: int, tokens: int, pass_tokens: int) -> float:
    """Empty all slots and read `count` random prompts into the first; returns seconds of reading.

    Some at a time, and longer ones in pieces of `pass_tokens`. `runner.token_S` holds the first new tokens afterwards.
    """
    vocabulary = runner.model.config.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (count, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    together = max(1, pass_tokens // tokens)
    for buffer in (*buffers(runner), runner.cache.length_S):  # positions, too
        buffer.zero_()
    runner.cache.lengths = [0] * len(runner.cache.lengths)
    synchronize(runner.device)
    began_s = time.perf_counter()
    for begin in range(0, count, together):
        rows = list(range(begin, min(begin + together, count)))
        for first in range(0, tokens, pass_tokens):
            logits_BV = runner.prefill(rows, [prompts[row][first : first + pass_tokens] for row in rows])
        runner.token_S[begin : begin + len(rows)] = logits_BV.argmax(-1)
    synchronize(runner.device)
    return time.perf_counter() - began_s


def copy_first_slot(runner: Runner) -> None:
    """Make all slots, and the tokens that they get next, those of the first."""
    for buffer in (*buffers(runner), runner.cache.length_S, runner.token_S):
        buffer[1:] = buffer[:1]
    runner.cache.lengths = runner.cache.lengths[:1] * len(runner.cache.lengths)


def buffers(runner: Runner) -> Iterator[torch.Tensor]:
    """What the slots keep."""
    for part in runner.cache.parts.values():
        yield from part.buffers.values()


def steps_of_block(model: LolcatsForCausalLM) -> int:
    """Steps after which the work repeats: a block leaves the terraced window once in so many."""
    spec = model.config.attention
    return max(spec.window_size, 1) if spec.window == "terraced" else 64


if __name__ == "__main__":
    main(globals(), DecodeBench())

"""Self-speculative decoding: what the model accepts of its draft, and what a round costs.

    python benchmarks/speculation.py --model FOLDER --data DATA --json speculation.json                  # all, on a GPU
    python benchmarks/speculation.py --sections acceptance --model FOLDER --data DATA --device cpu --dtype float32 \
        --json speculation_cpu.json
    python benchmarks/speculation.py --sections lookup,checks --model MODEL --data DATA --context 2048 --json FILE

Sections: acceptance, the mean tokens accepted of those drafted by kind of text, context and draft, greedily or at
--temperature, in the engine's own rounds, beside what n-gram lookup in the context would draft of the model's answer,
and what a linearized model (--trained FOLDER) would, its linear states and adapters included; and the cache's bytes
with a draft and without; lookup, tokens/s of whole answers of any model, linearized or not, with drafts that are looked
up in the text and without, by kind of text, from prompts of --context tokens; checks, milliseconds of its steps and of
checks of 2 to --drafted + 1 tokens at --context, beside what the engine assumes; end_to_end, tokens/s with the draft
and without, from prompts of --context tokens; steps, for --shape with random weights, milliseconds of a decoding step,
of a draft's and of a check, and the speed-up that follows at the acceptance of --rates.

DATA has wikitext2, books, openstax and alpaca files as `TEXTS` names them. Development texts are the first half of each
file, those of --half report the second. Each row has --row-s seconds; the file is written after each.
"""

from __future__ import annotations

import gzip
import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from bench_tools import describe, free, main, random_model, settings_json, step_samples, synchronize
from rich.console import Console
from rich.table import Table

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import keep_softmax
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.generation.drafting import PassCosts, counts_to
from lolcats.generation.engine import Engine
from lolcats.generation.lookup import Lookup
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.speculation import Draft, Speculation
from lolcats.generation.text import chat_text
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance

TEXTS = {
    "encyclopedia": ("eval/wikitext2/validation.jsonl.gz", "page"),
    "books": ("train/books_pd.jsonl.gz", "text"),
    "textbooks": ("train/openstax_ccby.jsonl.gz", "text"),
    "instructions": ("train/alpaca_cleaned_20230329.jsonl.gz", "instruction"),
    "summaries": ("train/openstax_ccby.jsonl.gz", "text"),  # of a textbook's pages
}
SUMMARIZE = "Summarize this text.\n\n"
SECTIONS = ("acceptance", "lookup", "checks", "end_to_end", "steps")
WARM_UP = 12  # rounds, in which an adaptive draft finds its length and all graphs are captured
# The heads that `lolcats-hybrid` chose for SmolLM2-135M, an eighth.
EXACT = "0.0 7.2 8.0 15.2 17.1 18.2 20.1 20.2 23.0 23.2 24.0"


@dataclass(frozen=True)
class SpeculationBench:
    """What to measure."""

    sections: tuple[str, ...] = SECTIONS
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    gguf_file: str = ""
    data: str = ""
    half: str = "report"  # of the texts; or development
    kinds: tuple[str, ...] = tuple(TEXTS)
    contexts: tuple[int, ...] = (512, 2048, 8064)
    prompts: int = 2  # of each kind and context
    new_tokens: int = 96
    exact: str = EXACT  # heads that read the whole cache
    windows: tuple[int, ...] = (512,)
    sinks: int = 4
    drafted: int = 8
    temperature: float = 0.0  # of acceptance
    without_exact: bool = True  # also drafts without such heads
    trained: str = ""  # folder of a linearized model
    context: int = 8064  # of end_to_end
    batches: tuple[int, ...] = (1, 16, 64)  # of end_to_end and steps
    shape: str = "llama3-8b"
    exact_share: float = 0.125  # of the shape's heads
    step_contexts: tuple[int, ...] = (2048, 8192, 32768)
    rates: tuple[float, ...] = (0.7, 0.8, 0.9, 0.95)  # acceptance of a token
    steps: int = 20
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cuda"
    row_s: int = 600


def run(
    bench: SpeculationBench, console: Console, keep: Callable[[dict[str, Any]], object] = lambda report: None
) -> dict[str, Any]:
    """Measure the sections; rows that fail or take too long say so."""
    if unknown := set(bench.sections) - set(SECTIONS):
        raise UserError(f"--sections: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    report: dict[str, Any] = {"settings": settings_json(bench), "provenance": provenance()}
    report |= {name: [] for name in bench.sections}
    keep(report)
    measure = {"acceptance": _acceptance, "lookup": _lookup, "checks": _checks, "end_to_end": _end_to_end}
    measure["steps"] = _steps
    for name in bench.sections:
        for row in measure[name](bench):
            report[name].append(row)
            keep(report)
            console.print(f"{name}: {json.dumps(row)}", highlight=False, markup=False, soft_wrap=True)
    return report


@contextmanager
def time_limit(row: dict[str, Any], seconds: int) -> Iterator[None]:
    """What fails within the block, or takes longer, becomes the row's error."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except Exception as error:
        row["error"] = describe(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- acceptance ---------------------------------------------------------------------------------------------------


def _acceptance(bench: SpeculationBench) -> Iterator[dict[str, Any]]:
    """A row for each prompt: its text is read once, and each draft continues from there."""
    model, tokenizer = _load(bench)
    drafts = _drafts(bench)
    trained = load_model(bench.trained, dtype=bench.dtype, device=bench.device)[0] if bench.trained else None
    for context in bench.contexts:
        for kind in bench.kinds:
            for number, prompt in enumerate(prompts_of(bench, tokenizer, kind, context)):
                row: dict[str, Any] = {"context": context, "kind": kind, "number": number, "prompt_tokens": len(prompt)}
                with time_limit(row, bench.row_s):
                    row |= accepted(model, tokenizer, prompt, drafts, bench, trained)
                yield row
                free(torch.device(bench.device))


def accepted(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    drafts: dict[str, Draft],
    bench: SpeculationBench,
    trained: Any = None,
) -> dict[str, Any]:
    """Mean tokens accepted of those drafted, by draft; greedy answers are compared with the model's own."""
    params = SamplingParams(max_new_tokens=bench.new_tokens, temperature=bench.temperature, seed=bench.seed)
    limit = len(prompt) + bench.new_tokens
    with Engine(model, tokenizer, max_slots=1, max_length=limit, prefill_chunk=128) as engine:
        snapshot = engine.snapshot(prompt)
        plain = engine.submit(None, params, snapshot=snapshot).result().token_ids
        cache = {"softmax": engine.runner.cache.nbytes}
    found: dict[str, Any] = {"new_tokens": len(plain), "distinct_tokens": len(set(plain)), "accepted": {}, "rounds": {}}
    found |= {"differs": [], "cache_bytes": cache}
    for name, draft in drafts.items():
        engine = Engine(model, tokenizer, max_slots=1, max_length=limit, draft=draft)
        counts: list[int] = []
        assert engine.runner.speculation is not None
        engine.runner.speculation.acceptance.note = lambda count, tried, counts=counts: counts.append(count)  # type: ignore[method-assign]
        tokens = engine.submit(None, params, snapshot=snapshot).result().token_ids
        cache[name] = engine.runner.cache.nbytes
        engine.shutdown()
        whole = counts[: _whole_rounds(counts, len(tokens), draft.most)]
        found["accepted"][name], found["rounds"][name] = _mean(whole), len(whole)
        found["differs"] += [name] if tokens != plain and not bench.temperature else []
    without = {"n-gram lookup": ngram_lookup(prompt, plain, bench.drafted)}
    if trained is not None:
        without["trained"] = trained_draft(trained, prompt, plain, bench.drafted)
    for name, counts in without.items():
        found["accepted"][name], found["rounds"][name] = _mean(counts), len(counts)
    return found


def _whole_rounds(counts: list[int], tokens: int, most: int) -> int:
    """Rounds before which enough tokens were left for all drafts: the answer's end would count as a rejection."""
    at, whole = 1, 0  # the first token comes from the prompt
    for count in counts:
        if at + most > tokens:
            break
        at, whole = at + count + 1, whole + 1
    return whole


def _mean(counts: list[int]) -> float | None:
    return sum(counts) / len(counts) if counts else None


def ngram_lookup(prompt: list[int], answer: list[int], drafted: int, longest: int = 3) -> list[int]:
    """Accepted tokens of each round, if what followed the last tokens where they stood before is the draft."""
    tokens, counts, at = prompt + answer, [], len(prompt) + 1
    while at + drafted <= len(tokens):
        guess: list[int] = []
        for size in range(longest, 0, -1):
            ending = tokens[at - size : at]
            places = (i for i in range(at - size - 1, -1, -1) if tokens[i : i + size] == ending)
            if (place := next(places, None)) is not None:
                guess = tokens[place + size : min(place + size + drafted, at)]
                break
        count = 0
        while count < len(guess) and guess[count] == tokens[at + count]:
            count += 1
        counts.append(count)
        at += count + 1
    return counts


@torch.no_grad()
def trained_draft(model: Any, prompt: list[int], answer: list[int], drafted: int) -> list[int]:
    """Accepted tokens of each round, if the linearized model drafts greedily from a state of its own."""
    cache = model(torch.tensor([prompt], device=model.device), logits_to_keep=1).past_key_values
    cache.activate_past_recording()
    counts, at, read = [], 1, 0  # tokens of the answer that stand, and that the cache has read
    while at + drafted <= len(answer):
        guess, new = [], answer[read:at]
        for _ in range(drafted):
            ids = torch.tensor([new], device=model.device)
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            guess.append(int(logits[0, -1].argmax()))
            new = guess[-1:]
        count = 0
        while count < drafted and guess[count] == answer[at + count]:
            count += 1
        read = at + min(count, drafted - 1)  # the last token that was drafted was not read
        cache.crop(read - (at + drafted - 1))
        counts.append(count)
        at += count + 1
    return counts


def prompts_of(bench: SpeculationBench, tokenizer: Any, kind: str, context: int) -> list[list[int]]:
    """Token ids of about `context` tokens, seldom more: texts to continue or to summarize, conversations."""
    file, name = TEXTS[kind]
    with gzip.open(Path(bench.data) / file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    middle = len(rows) // 2
    rows = rows[:middle] if bench.half == "development" else rows[middle:]
    source = random.Random(f"{bench.seed} {kind} {context}")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def asked(*messages: str) -> list[int]:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        return encode(chat_text(tokenizer, turns))

    found = []
    for _ in range(bench.prompts):
        ids: list[int] = []
        if kind == "instructions":
            question, earlier = _instruction(source.choice(rows)), []
            while len(asked(*earlier, question)) <= context:
                record = source.choice(rows)
                ids, earlier = asked(*earlier, question), [*earlier, _instruction(record), record["output"]]
        else:
            room = context - (len(asked(SUMMARIZE)) if kind == "summaries" else 0)
            while len(ids) < room:
                ids += encode(source.choice(rows)[name][: 8 * context])
            ids = asked(SUMMARIZE + tokenizer.decode(ids[:room])) if kind == "summaries" else ids[:room]
        found.append(ids)
    return found


def _instruction(record: dict[str, str]) -> str:
    return "\n".join(filter(None, (record["instruction"], record["input"])))


def _load(bench: SpeculationBench) -> tuple[LolcatsForCausalLM, Any]:
    given = {"gguf_file": bench.gguf_file} if bench.gguf_file else {}
    model, tokenizer = load_model(bench.model, dtype=bench.dtype, device=bench.device, **given)
    return (model if isinstance(model, LolcatsForCausalLM) else keep_softmax(model)), tokenizer


def _drafts(bench: SpeculationBench) -> dict[str, Draft]:
    settings: dict[str, Any] = {"sinks": bench.sinks, "most": bench.drafted, "adapt": False}
    heads = bench.exact.split()
    found = {}
    for window in bench.windows:
        if heads:
            found[f"{len(heads)} heads, window {window}"] = Draft(tuple(heads), window=window, **settings)
        if bench.without_exact or not heads:
            found[f"window {window}"] = Draft(window=window, **settings)
    return found


def _lookup(bench: SpeculationBench) -> Iterator[dict[str, Any]]:
    """Tokens/s of answers after their first step, the last of three runs: the others compile and capture."""
    model, tokenizer = _load(bench)
    params = SamplingParams(max_new_tokens=bench.new_tokens, ignore_eos=True, temperature=bench.temperature)
    for kind in bench.kinds:
        prompts = prompts_of(bench, tokenizer, kind, bench.context)
        limit = max(map(len, prompts)) + bench.new_tokens
        with Engine(model, tokenizer, max_slots=1, max_length=limit) as engine:
            snapshots = [engine.snapshot(prompt) for prompt in prompts]
        for batch in bench.batches:
            plain: list[list[int]] = []
            for name, draft in (("plain", None), ("lookup", Lookup(bench.drafted))):
                row: dict[str, Any] = {"kind": kind, "context": bench.context, "batch": batch, "decoding": name}
                with time_limit(row, bench.row_s):
                    found, tokens, seconds, steps = _answers(model, tokenizer, snapshots, batch, limit, draft, params)
                    plain = plain or found
                    row |= {"tokens_s": tokens / seconds, "seconds": seconds, "steps": steps}
                    row["same_answers"] = sum(one == other for one, other in zip(found, plain, strict=True))
                    row["answers"] = len(found)
                yield row
                free(torch.device(bench.device))


def _answers(
    model: Any,
    tokenizer: Any,
    snapshots: list[Any],
    batch: int,
    limit: int,
    draft: Lookup | None,
    params: SamplingParams,
) -> tuple[list[list[int]], int, float, int]:
    """Answers, of each snapshot alone or of a batch that repeats them; tokens, seconds, and steps of the engine.

    The clock starts after the first step, into which reading the snapshots falls.
    """
    engine = Engine(model, tokenizer, max_slots=batch, max_length=limit, draft=draft)
    rounds = [[one] for one in snapshots] if batch == 1 else [(snapshots * batch)[:batch]]
    try:
        for _ in range(3):
            answers, tokens, seconds, steps = [], 0, 0.0, 0
            for each in rounds:
                handles = [engine.submit(None, params, snapshot=one, stream=False) for one in each]
                engine.step()
                synchronize(engine.runner.device)
                begin_s, before = perf_counter(), engine.runner.tokens_decoded
                while engine.step():
                    steps += 1
                seconds += perf_counter() - begin_s
                tokens += engine.runner.tokens_decoded - before
                answers += [handle.result().token_ids for handle in handles]
        return answers, tokens, seconds, steps
    finally:
        engine.shutdown(drain=False)


def _checks(bench: SpeculationBench) -> Iterator[dict[str, Any]]:
    """Milliseconds of passes over slots that were set to a length and never filled."""
    model, _ = _load(bench)
    for batch in bench.batches:
        row: dict[str, Any] = {"context": bench.context, "batch": batch}
        with time_limit(row, bench.row_s):
            row |= check_times(model, batch, bench)
        yield row
        free(torch.device(bench.device))


def check_times(model: LolcatsForCausalLM, batch: int, bench: SpeculationBench) -> dict[str, Any]:
    """Of a step, and of checks by their tokens, also in steps; and what `PassCosts` says of these."""
    device, costs = torch.device(bench.device), PassCosts(model)
    runner = Runner(model, batch, bench.context + bench.steps + 64, draft=Lookup(bench.drafted))
    length = bench.context + 1  # a block of linear heads begins before it
    counts = [count + 1 for count in counts_to(bench.drafted) if count]

    def set_lengths() -> None:
        runner.lengths = [length] * batch
        runner.keep([0] * batch)

    try:
        samples = {}
        with torch.no_grad():
            for count in (1, *counts):
                tokens = [[1] * count] * batch
                run = partial(runner.decode_greedy, batch) if count == 1 else partial(runner.check, tokens)
                for _ in range(3):
                    run()
                set_lengths()
                samples[count] = sorted(step_samples(run, bench.steps, device))[bench.steps // 2]
                set_lengths()
        assumed = {count: costs.of([length] * batch, count) + costs.round for count in samples}
        return {
            "step_ms": samples[1],
            "check_ms": {str(count): samples[count] for count in counts},
            "check_in_steps": {str(count): samples[count] / samples[1] for count in counts},
            "assumed_in_steps": {str(count): assumed[count] / assumed[1] for count in counts},
        }
    finally:
        runner.close()


# --- on a GPU -----------------------------------------------------------------------------------------------------


def _end_to_end(bench: SpeculationBench) -> Iterator[dict[str, Any]]:
    """Tokens/s of answers to prompts of natural text, with the draft and without; prompts are read before."""
    model, tokenizer = _load(bench)
    draft = next(iter(_drafts(bench).values()))
    prompts = [prompt for kind in bench.kinds for prompt in prompts_of(bench, tokenizer, kind, bench.context)]
    limit = max(map(len, prompts)) + 2 * bench.new_tokens + (WARM_UP + 1) * (bench.drafted + 1)
    with Engine(model, tokenizer, max_slots=1, max_length=limit) as engine:
        snapshots = [engine.snapshot(prompt) for prompt in prompts]
    for batch in bench.batches:
        for name, used in (("softmax", None), ("draft", draft), ("adaptive draft", Draft(draft.exact, draft.window))):
            row: dict[str, Any] = {"batch": batch, "context": bench.context, "decoding": name}
            with time_limit(row, bench.row_s):
                row |= _tokens_per_s(model, tokenizer, (snapshots * batch)[:batch], limit, used, bench)
            yield row
            free(torch.device(bench.device))


def _tokens_per_s(
    model: Any, tokenizer: Any, snapshots: list[Any], limit: int, draft: Draft | None, bench: SpeculationBench
) -> dict[str, Any]:
    """While all sequences run: the first to end ends the measurement."""
    engine = Engine(model, tokenizer, max_slots=len(snapshots), max_length=limit, draft=draft)
    try:
        new = 2 * bench.new_tokens + WARM_UP * (bench.drafted + 1)
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        handles = [engine.submit(None, params, snapshot=snapshot, stream=False) for snapshot in snapshots]
        for _ in range(WARM_UP):  # captures the graphs
            engine.step()
        if engine.counts["running"] < len(snapshots):
            raise RuntimeError(f"{engine.counts['running']} of {len(snapshots)} sequences run")
        device, before, begin_s = torch.device(bench.device), engine.counts["tokens_decoded"], perf_counter()
        while engine.counts["running"] == len(snapshots) and engine.step():
            pass
        synchronize(device)
        tokens, seconds = engine.counts["tokens_decoded"] - before, perf_counter() - begin_s
        for handle in handles:
            handle.cancel()
        row = {"tokens_s": tokens / seconds, "seconds": seconds, "cache_gib": engine.runner.cache.nbytes / 2**30}
        if engine.runner.speculation is not None:
            row["acceptance"] = engine.runner.speculation.acceptance.rate
        return row
    finally:
        engine.shutdown(drain=False)


def _steps(bench: SpeculationBench) -> Iterator[dict[str, Any]]:
    """Milliseconds of the passes over slots that were set to a length and never filled."""
    model = random_softmax_model(bench)
    heads = [(layer.index, head) for layer in model.config.layer_heads for head in range(layer.num_kv_heads)]
    chosen = random.Random(bench.seed).sample(heads, round(bench.exact_share * len(heads)))
    draft = Draft(tuple(f"{index}.{head}" for index, head in chosen), bench.windows[0], most=bench.drafted)
    for context in bench.step_contexts:
        for batch in bench.batches:
            row: dict[str, Any] = {"context": context, "batch": batch}
            with time_limit(row, bench.row_s):
                row |= pass_times(model, context, batch, draft, bench)
            yield row
            free(torch.device(bench.device))


def random_softmax_model(bench: SpeculationBench) -> LolcatsForCausalLM:
    """The shape with random weights and softmax attention in all heads."""
    kind = {"tokens": max(bench.step_contexts) + 1024, "dtype": bench.dtype, "device": bench.device}
    model = random_model(bench.shape, AttentionConfig(), **kind)
    model.set_exact({layer.index: range(layer.num_kv_heads) for layer in model.config.layer_heads})
    return model


def pass_times(
    model: LolcatsForCausalLM, context: int, batch: int, draft: Draft, bench: SpeculationBench
) -> dict[str, Any]:
    """Milliseconds of a step, a step of the draft and a check, and the speed-up at each rate of acceptance."""
    device = torch.device(bench.device)
    runner = Runner(model, batch, context + 4 * bench.steps + 64, draft=draft)
    try:
        for slot in range(batch):
            runner._set_length(slot, context)
        runner.active_S.fill_(True)
        rows, past = batch, runner.cache.places if runner.graphs is not None else context + bench.drafted

        def draft_step() -> None:
            runner.step_1.zero_()
            runner._captured(("draft", rows, False), lambda: runner._draft(rows, past, False))

        def check() -> None:
            runner._captured(("check", rows, bench.drafted), lambda: runner._check(rows, past, bench.drafted))

        calls: dict[str, Callable[[], object]] = {
            "step": lambda: runner.decode_greedy(batch),
            "draft": draft_step,
            "check": check,
        }
        row: dict[str, Any] = {}
        with torch.no_grad():
            for name, call in calls.items():
                for _ in range(3):
                    call()
                samples = sorted(step_samples(call, bench.steps, device))
                row[f"{name}_ms"] = samples[len(samples) // 2]
        row |= {f"{name}_in_steps": row[f"{name}_ms"] / row["step_ms"] for name in ("draft", "check")}
        cost = bench.drafted * row["draft_in_steps"] + row["check_in_steps"]
        row["speed_up"] = {str(rate): expected_tokens(rate, bench.drafted) / cost for rate in bench.rates}
        speculation = Speculation(model, draft)
        row["predicted"] = {
            str(rate): speculation.speed_up(rate, bench.drafted, [context] * batch) for rate in bench.rates
        }
        return row
    finally:
        runner.close()


def expected_tokens(rate: float, drafted: int) -> float:
    """Of a round, if each drafted token is accepted with the same chance."""
    return sum(rate**count for count in range(drafted + 1))


# --- tables -------------------------------------------------------------------------------------------------------


def print_table(report: dict[str, Any], console: Console) -> None:
    """The sections' tables; of acceptance, means over rounds by context and kind."""
    if rows := [row for row in report.get("acceptance", []) if "error" not in row]:
        names = list(rows[0]["accepted"])
        table = Table("context", "text", "prompts", *names, title="mean accepted of those drafted")
        groups = [
            (context, kind) for context in dict.fromkeys(row["context"] for row in rows) for kind in (*TEXTS, "all")
        ]
        for context, kind in groups:
            picked = [row for row in rows if row["context"] == context and kind in (row["kind"], "all")]
            if picked:
                cells = (mean_accepted(picked, name) for name in names)
                table.add_row(str(context), kind, str(len(picked)), *("" if x is None else f"{x:.2f}" for x in cells))
        console.print(table)
    for name in ("lookup", "checks", "end_to_end", "steps"):
        if rows := report.get(name):
            columns = list(dict.fromkeys(key for row in rows for key in row))
            table = Table(*columns, title=name)
            for row in rows:
                table.add_row(*(_cell(row.get(column)) for column in columns))
            console.print(table)


def mean_accepted(rows: list[dict[str, Any]], name: str) -> float | None:
    """Over the rounds of all rows."""
    pairs = [(row["accepted"][name], row["rounds"][name]) for row in rows if row["accepted"].get(name) is not None]
    rounds = sum(count for _, count in pairs)
    return sum(mean * count for mean, count in pairs) / rounds if rounds else None


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell(one)}" for key, one in value.items())
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    main(globals(), SpeculationBench())

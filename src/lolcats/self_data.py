"""Training data that the model to linearize writes itself, as `data.sources` may ask for: what it can do shows in them.

`path: self`: a chat model samples a user's message from the beginning of its own chat template, as Magpie
(arXiv:2406.08464), and then the answer; a base model continues from its begin token. `answers: teacher`: it answers the
prompts of a source. Rows are kept in the data cache under the hash of what decides them; an interrupted run resumes.
"""

from __future__ import annotations

import gc
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console

from lolcats.config import DataSource, ModelSection
from lolcats.conversion import keep_softmax, positions_of
from lolcats.data.cache import cache_directory, content_hash
from lolcats.data.packing import read_documents
from lolcats.data.sources import open_source
from lolcats.data.templates import request
from lolcats.errors import UserError
from lolcats.generation.engine import Engine, slots_in_memory
from lolcats.generation.request import Piece, Result, chat_text
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling.cache import longrope_border
from lolcats.modeling.loading import load_base_model, load_skeleton, load_tokenizer, locate
from lolcats.report import write_text
from lolcats.training.progress import Progress
from lolcats.training.run_folder import weights_hash

ROWS = 4000  # sampled, of which some three quarters are kept
PROMPT = {"temperature": 1.0, "top_k": 100}
ANSWER = {"temperature": 0.8, "top_k": 100, "top_p": 0.95}
MAX_LENGTH = 2048  # tokens of a dialogue, template included: half for the answer, a quarter for a prompt
SLOTS = 512  # rows sampled at a time, where memory allows
MOST_COMPRESSED = 6.0  # texts that zlib makes smaller than by this factor do not repeat themselves
SHORTEST_PROMPT, SHORTEST_TEXT = 12, 200  # characters

Conversation = list[dict[str, str]]
Sampler = Callable[[dict[int, list[int]], int, dict[str, Any], int], Iterator[dict[str, Any]]]
"""Of token ids by index, most new tokens, sampling parameters and a seed: {index, text, finished, tokens} of each, when
it ends."""


def written_file(section: ModelSection, source: DataSource, seed: int, console: Console) -> tuple[Path, dict[str, Any]]:
    """The rows that the model of `section` writes for `source`, as a file of JSON lines, and a report on them."""
    prompts = None if source.path == "self" else prompts_of(source, console)
    count = source.max_rows or ROWS if prompts is None else len(prompts)
    sampling = {"prompts": PROMPT if prompts is None else "given", "answers": ANSWER, "length": MAX_LENGTH}
    decides = {"model": weights_hash(section), "prompts": prompts or count, "sampling": sampling, "seed": seed}
    key = content_hash([2, decides])  # 2: which rows are left out
    folder = cache_directory() / f"self-{key[:32]}"
    folder.mkdir(parents=True, exist_ok=True)
    file, about = folder / "rows.jsonl", folder / "about.json"
    with FileLock(folder / "lock"):
        if not about.is_file():
            found = _write(section, file, count, prompts, seed, console)
            gc.collect()  # the run loads the model again, and both may not fit
            torch.cuda.empty_cache()
            write_text(about, json.dumps(found | {"sampling": sampling, "hash": key}, indent=1))
    report = json.loads(about.read_text(encoding="utf-8"))
    left_out = ", ".join(f"{count} {reason}" for reason, count in report["left_out"].items()) or "none"
    console.print(f"{report['rows']} rows by the model itself (left out: {left_out}): {file}", soft_wrap=True)
    return file, report


def _write(
    section: ModelSection, file: Path, count: int, prompts: list[Conversation] | None, seed: int, console: Console
) -> dict[str, Any]:
    skeleton, tokenizer = load_skeleton(section), load_tokenizer(locate(section))
    length = min(MAX_LENGTH, positions_of(skeleton), longrope_border(skeleton.config) or MAX_LENGTH)
    with closing(Progress(console)) as progress:
        sample = engine_sampler(section, length, min(SLOTS, count))
        return write_rows(tokenizer, length, file, count, sample, prompts=prompts, seed=seed, progress=progress)


def engine_sampler(section: ModelSection, length: int, slots: int) -> Sampler:
    """The engine, for up to so many sequences of `length` tokens at a time."""
    base, tokenizer = load_base_model(section)
    model = keep_softmax(base)
    slots = slots_in_memory(model, length, slots)
    engine = Engine(model, tokenizer, max_slots=slots, max_length=length, prefill_chunk=4096)
    engine.runner.compiled.works = False  # compiling takes longer than it saves for so few tokens

    def sample(prompts: dict[int, list[int]], new: int, params: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
        events: dict[int, Piece] = {}  # the latest of each
        for index, prompt in prompts.items():
            sampling = SamplingParams(max_new_tokens=new, **params, seed=(seed << 32) + index)
            engine.submit(prompt, sampling, stream=False, on_event=partial(events.__setitem__, index))
        while engine.step() or events:
            for index, result in {i: event for i, event in events.items() if isinstance(event, Result)}.items():
                if result.error is not None:
                    raise UserError(f"the model's own data: {result.error}; rows are kept, the same command resumes")
                row = {"index": index, "text": result.text, "finished": result.finish_reason == "stop"}
                yield row | {"tokens": len(result.token_ids)}
            events.clear()

    return sample


def written_key(source: DataSource) -> str:
    """What decides the rows that are written for a source, whatever its share in a mixture."""
    return source.model_dump_json(include={"path", "name", "split", "answers", "max_rows"})


def prompts_of(source: DataSource, console: Console) -> list[Conversation]:
    """What the rows of a source ask."""
    rows = read_documents(open_source(source).rows(), request, name=source.path, first_row=0, advance=lambda rows: None)
    found = list(chain.from_iterable(rows))
    for reason, count in Counter(each for each in found if isinstance(each, str)).items():
        console.print(f"{source.path}: {count} rows are not answered: {reason}", markup=False, soft_wrap=True)
    prompts = [each for each in found if not isinstance(each, str)]
    if not prompts:
        raise UserError(f"{source.path}: answers=teacher needs messages, instructions, prompts or questions")
    return prompts


def write_rows(
    tokenizer: Any,
    length: int,
    file: Path,
    count: int,
    sample: Sampler,
    *,
    prompts: list[Conversation] | None = None,
    seed: int = 0,
    progress: Progress,
) -> dict[str, Any]:
    """Sample `count` rows and write the good ones as JSON lines: `messages` of a chat model, `text` of a base model.

    A good row ends by itself, does not repeat itself, and no other row has the same prompt. What was sampled stays in
    files next to `file`, from which an interrupted call continues.

    Args:
        length: most tokens of a row: half for an answer, a quarter for a prompt.
        prompts: what to answer; None: sampled, too.

    Returns:
        rows, how many were left out, by the reason, and tokens sampled.
    """

    def draw(name: str, prompts: list[list[int]], new: int, params: dict[str, Any], seed: int) -> list[dict[str, Any]]:
        """What is sampled for each prompt, in their order; the file of that name gets a line of each when it ends."""
        lines = file.with_suffix(f".{name}")
        kept = (lines.read_text(encoding="utf-8") if lines.exists() else "").rpartition("\n")
        write_text(lines, kept[0] + kept[1])  # without a last line that was cut
        found = {row["index"]: row for row in map(json.loads, kept[0].splitlines())}
        missing = {index: prompt for index, prompt in enumerate(prompts) if index not in found}
        tokens = sum(row["tokens"] for row in found.values())
        progress.start(f"the model's own {name}", "", len(prompts), len(found))
        with lines.open("a", encoding="utf-8") as stream:
            for row in sample(missing, new, params, seed):
                print(json.dumps(row), file=stream, flush=True)
                found[row["index"]] = row
                tokens += row["tokens"]
                progress.update(len(found), "", tokens)
        return [found[index] for index in sorted(found)]

    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()

    def good(drafts: list[dict[str, Any]], what: str, shortest: int, whole: bool = True) -> dict[int, str]:
        """Their texts by index, but for those that are cut off, short or repeat themselves."""
        texts = {row["index"]: row["text"].strip() for row in drafts if row["finished"] or not whole}
        left_out[f"{what} without an end"] += len(drafts) - len(texts)
        kept = {index: text for index, text in texts.items() if _is_good(text, shortest)}
        left_out[f"{what} too short or repetitive"] += len(texts) - len(kept)
        return kept

    if getattr(tokenizer, "chat_template", None):
        # A chat model: prompts, unless they are given, then an answer to each.
        if prompts is None:
            opening, stop = _user_turn(tokenizer)
            drafts = draw("prompts", [opening] * count, length // 4, PROMPT | stop, seed)
            texts = good(drafts, "prompts", SHORTEST_PROMPT).values()
            prompts = [[{"role": "user", "content": text}] for text in texts]
        different = list({json.dumps(prompt): prompt for prompt in prompts}.values())
        left_out["prompts like another"] = len(prompts) - len(different)
        asked: list[tuple[Conversation, list[int]]] = []
        for prompt in different:
            with suppress(UserError) if len(prompt) > 1 else nullcontext():  # templates may know no system message
                asked.append((prompt, _encode(tokenizer, chat_text(tokenizer, prompt))))
        left_out["prompts with a system message that the template refuses"] = len(different) - len(asked)
        short = [(prompt, ids) for prompt, ids in asked if len(ids) <= length // 2]
        left_out[f"prompts longer than {length // 2} tokens"] = len(asked) - len(short)
        samples = draw("samples", [ids for _, ids in short], length // 2, ANSWER, seed + 1)
        for index, text in good(samples, "answers", 1).items():
            rows.append({"messages": [*short[index][0], {"role": "assistant", "content": text}]})
    else:  # a base model continues from its begin token
        begin = next((x for x in (tokenizer.bos_token_id, tokenizer.eos_token_id) if x is not None), None)
        if begin is None or prompts is not None:
            need = "chat template" if prompts is not None else "begin or end token"
            raise UserError(f"this model's tokenizer has no {need}, so that it cannot write training data: give --data")
        samples = draw("samples", [[begin]] * count, length - 1, PROMPT, seed)
        rows = [{"text": text} for text in good(samples, "texts", SHORTEST_TEXT, whole=False).values()]
    left_out = +left_out  # without zeros
    if not rows:
        found = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise UserError(f"the model wrote no usable training data ({found}): give other prompts, or answers (--data)")
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return {"rows": len(rows), "left_out": dict(left_out), "tokens": sum(row["tokens"] for row in samples)}


def _user_turn(tokenizer: Any) -> tuple[list[int], dict[str, Any]]:
    """The tokens before a user's message in the chat template, and the sampling parameters that stop at its end."""
    mark = "a message to look for"
    opening, found, rest = chat_text(tokenizer, mark).partition(mark)
    special = [token for token in tokenizer.all_special_tokens if rest.lstrip().startswith(token)]
    end = max(special, key=len, default=next(iter(rest.split()), ""))
    if not opening or not found or not end:
        raise UserError(
            "this model's chat template marks no beginning or no end of a user's message, so that it cannot write"
            " prompts; give some, and it answers them: --data PROMPTS,answers=teacher"
        )
    stop = {"stop_token_ids": (tokenizer.convert_tokens_to_ids(end),)} if special else {"stop": (end,)}
    return _encode(tokenizer, opening), stop


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_good(text: str, shortest: int) -> bool:
    data = text.encode()
    repeats = len(data) > 2 * SHORTEST_TEXT and len(data) > MOST_COMPRESSED * len(zlib.compress(data))
    return len(text) >= shortest and not repeats and re.search(r"\w", text) is not None

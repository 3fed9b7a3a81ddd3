"""What a model still does: programs, sums, labels, MMLU, long answers, recall and perplexity, at several distances.

    python benchmarks/ability.py MODEL... --data FOLDER --json FILE     (folders or hub ids, linearized or not)

FOLDER has humaneval/test, gsm8k/{test,train}, mmlu/{test,dev}, wikitext2/validation (openai_humaneval, openai/gsm8k,
cais/mmlu, EleutherAI/wikitext_document_level) and wikitext2/haystack (pages as text) as .jsonl.gz. The engine answers
in the chat template, greedily but for `long`. HumanEval runs the model's programs: use a machine that may be lost.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import torch
from transformers import AutoTokenizer, QuantizedCache

from lolcats.conversion import keep_softmax
from lolcats.evaluation.distances import other_code, topics
from lolcats.evaluation.load import load_model
from lolcats.evaluation.recall import recall_accuracy
from lolcats.generation.engine import Engine
from lolcats.generation.request import end_tokens
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling.cache_size import cache_bytes
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance
from lolcats.self_data import MOST_COMPRESSED

LONG = 1000  # tokens of an answer before the part that `long` measures
PLACES = "public library, bakery, railway station, chess club, hospital ward, garden, harbour, school, cinema, farm"
FORMS = (
    "Write a story of at least 2000 words that takes place in a {}. Tell it scene by scene, with much dialogue.",
    "Write a handbook for people who want to run a {}: ten chapters, each of several paragraphs and with examples.",
    "Write a complete Python program to manage a {}: at least eight classes, each with docstrings and error handling,"
    " a menu for the terminal, and unit tests of every method. Show all of the code.",
    "Describe a whole day in a {}, hour by hour from morning to midnight: who comes, what is said, what goes wrong.",
)


def rows(folder: Path, name: str, split: str) -> list[dict[str, Any]]:
    with gzip.open(folder / name / f"{split}.jsonl.gz", "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def share(right: list[bool]) -> dict[str, float]:
    """Per cent, and its standard error."""
    count = max(1, len(right))
    mean = sum(right) / count
    return {"percent": 100 * mean, "stderr": 100 * math.sqrt(mean * (1 - mean) / count), "samples": len(right)}


class Answers:
    """Greedy answers of one model, by the engine; with `bits` by transformers, whose cache then has as many."""

    def __init__(self, model: Any, tokenizer: Any, slots: int, max_length: int, bits: int | None) -> None:
        self.model, self.tokenizer, self.slots, self.bits = model, tokenizer, slots, bits
        limits: Any = {"max_slots": slots, "max_length": max_length, "prefill_chunk": 4096}
        self.engine = Engine(model, tokenizer, **limits) if bits is None else None

    def chat(self, message: str, begin: str = "", turns: list[tuple[str, str]] | None = None) -> list[int]:
        """Tokens of a conversation: earlier turns, a user's message and the beginning of the answer."""
        messages = []
        for asked, answered in turns or []:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": message})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text + begin, add_special_tokens=False)["input_ids"])

    def __call__(self, prompts: list[list[int]], tokens: int, **params: Any) -> list[Any]:
        if self.engine is not None:
            return list(self.engine.generate(prompts, SamplingParams(max_new_tokens=tokens, **params)))
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found: dict[int, Any] = {}
        for start in range(0, len(order), self.slots):
            group = order[start : start + self.slots]
            answers = self._quantised([prompts[index] for index in group], tokens, **params)
            found |= dict(zip(group, answers, strict=True))
        return [found[index] for index in range(len(prompts))]

    @torch.no_grad()
    def _quantised(self, prompts: list[list[int]], tokens: int, **params: Any) -> list[Any]:
        """Results as the engine's, of one batch."""
        batch = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        cache = QuantizedCache("hqq", self.model.config, nbits=self.bits, axis_key=1, axis_value=1)
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, "past_key_values": cache}
        if "stop" in params:
            settings |= {"stop_strings": list(params["stop"]), "tokenizer": self.tokenizer}
        settings |= {"return_dict_in_generate": True, "output_logits": "logprobs" in params}
        found = self.model.generate(**batch.to(self.model.device), **settings)
        results = []
        ends = end_tokens(self.model)
        for row, ids in enumerate(found.sequences[:, batch["input_ids"].shape[1] :].tolist()):
            ids = ids[: next((place for place, token in enumerate(ids, 1) if token in ends), len(ids))]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            for stop in params.get("stop", ()):
                text = text.partition(stop)[0]
            top = [] if found.logits is None else [list(enumerate(found.logits[0][row].tolist()))]
            results.append(SimpleNamespace(text=text, token_ids=ids, top_logprobs=top))
        return results

    def shutdown(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()


class Served(Answers):
    """Greedy answers of a server with OpenAI's completions, `lolcats serve` or vLLM's; without log-probabilities."""

    def __init__(self, url: str, tokenizer: Any, clients: int) -> None:
        self.url, self.tokenizer, self.clients, self.engine = url, tokenizer, clients, None

    def __call__(self, prompts: list[list[int]], tokens: int, **params: Any) -> list[Any]:
        def answer(prompt: list[int]) -> Any:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, **params}
            request = Request(f"{self.url}/v1/completions", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            return SimpleNamespace(**json.load(urlopen(request))["choices"][0])

        with ThreadPoolExecutor(self.clients) as pool:
            return list(pool.map(answer, prompts))


class Prompted:
    """Stands in for a model: vLLM's scores of the likeliest and of the prompt's tokens; others share the rest."""

    device = "cpu"

    def __init__(self, served: Served) -> None:
        self.served, self.vocabulary = served, len(served.tokenizer)

    def __call__(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        answers = self.served(input_ids.tolist(), 1, prompt_logprobs=1)
        # By place one or two tokens. What follows the last one is not known.
        places = [[*(row := answer.prompt_logprobs[1 - logits_to_keep :]), row[-1]] for answer in answers]
        ids_BK2 = torch.tensor([[[int(min(found)), int(max(found))] for found in row] for row in places])
        scores = [[[found[min(found)]["logprob"], found[max(found)]["logprob"]] for found in row] for row in places]
        rest = [[1 - sum(math.exp(entry["logprob"]) for entry in found.values()) for found in row] for row in places]
        rest_BK = torch.tensor(rest).clamp_min(1e-9) / self.vocabulary
        logits_BKV = rest_BK.log()[..., None].repeat(1, 1, self.vocabulary)
        return SimpleNamespace(logits=logits_BKV.scatter_(2, ids_BK2, torch.tensor(scores)))


# --- programs ------------------------------------------------------------------------------------------------------


def passes(program: str) -> bool:
    limits, passed = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({4 << 30}, {4 << 30}))\n", token_hex()
    command = [sys.executable, "-I", "-c", f"{limits}{program}\nprint({passed!r})"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=15)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and passed.encode() in done.stdout


def programs(answers: Answers, tasks: list[dict[str, Any]], before: int, draw: int) -> list[list[int]]:
    """Tokens of HumanEval's tasks, after so many of other code."""
    prompts = []
    for number, task in enumerate(tasks):
        front = other_code(answers.tokenizer, before, number + 1000 * draw) if before else ""
        ask = "Write a solution to the following problem and make sure that it passes the tests:\n"
        begin = f"Here is the completed function:\n```python\n{task['prompt']}"
        prompts.append(answers.chat(f"{front}{ask}```python\n{task['prompt']}\n```", begin))
    return prompts


def humaneval(
    answers: Answers, folder: Path, before: int = 0, count: int | None = None, draw: int = 0
) -> dict[str, float]:
    """pass@1 with so many tokens of other code before the task (prompt as lm-eval's humaneval_instruct)."""
    tasks = rows(folder, "humaneval", "test")[:count]
    results = answers(programs(answers, tasks, before, draw), 512, stop=("\n```",))
    written = [
        f"{task['prompt']}{result.text}\n{task['test']}\ncheck({task['entry_point']})\n"
        for task, result in zip(tasks, results, strict=True)
    ]
    with ThreadPoolExecutor(16) as pool:
        return share(list(pool.map(passes, written)))


# --- sums, labels, questions ---------------------------------------------------------------------------------------


def number(text: str) -> str | None:
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return found[-1].replace(",", "").rstrip(".").removesuffix(".00") if found else None


def examples(folder: Path, shots: int) -> list[tuple[str, str]]:
    return [(row["question"], re.sub(r"<<.*?>>", "", row["answer"])) for row in rows(folder, "gsm8k", "train")[:shots]]


def gsm8k(answers: Answers, folder: Path, shots: int, count: int) -> dict[str, float]:
    """The last number of the answer; examples are earlier turns of the conversation."""
    tasks = rows(folder, "gsm8k", "test")[:count]
    ask = "{0}" if shots else "{0}\nSolve it step by step. End with the number alone, after ####."
    shown = examples(folder, shots)
    results = answers([answers.chat(ask.format(row["question"]), "", shown) for row in tasks], 400)
    return share(
        [
            number(result.text) is not None and number(result.text) == number(row["answer"])
            for result, row in zip(results, tasks, strict=True)
        ]
    )


def labels(answers: Answers, folder: Path, shots: int, count: int) -> dict[str, float]:
    """Many-shot classification, as `lolcats eval --tasks topics`."""
    tasks = topics(rows(folder, "mmlu", "test"), shots)["custom_dataset"]()["test"].select(range(count))
    results = answers([answers.chat(task["text"], "Group:") for task in tasks], 2)
    return share([result.text.strip()[:1] == task["label"] for result, task in zip(results, tasks, strict=True)])


def mmlu(answers: Answers, folder: Path, count: int) -> dict[str, float]:
    """5-shot, by the likeliest letter; every so-many-th question."""
    shown: dict[str, list[str]] = {}

    def block(row: dict[str, Any]) -> str:
        choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return f"{row['question'].strip()}\n{choices}Answer:"

    for row in rows(folder, "mmlu", "dev"):
        shown.setdefault(row["subject"], []).append(f"{block(row)} {'ABCD'[row['answer']]}\n\n")
    tasks = rows(folder, "mmlu", "test")
    tasks = tasks[:: max(1, len(tasks) // count)][:count]
    prompts = []
    for row in tasks:
        head = (
            f"The following are multiple choice questions (with answers) about {row['subject'].replace('_', ' ')}.\n\n"
        )
        prompts.append(answers.tokenizer(head + "".join(shown[row["subject"]][:5]) + block(row))["input_ids"])
    letters = [answers.tokenizer(f" {letter}", add_special_tokens=False)["input_ids"][0] for letter in "ABCD"]
    results = answers(prompts, 1, logprobs=20)
    picked = []
    for result in results:
        found = dict(result.top_logprobs[0])
        picked.append(max(range(4), key=lambda place: found.get(letters[place], -math.inf)))
    return share([place == row["answer"] for place, row in zip(picked, tasks, strict=True)])


def long_answers(answers: Answers, count: int) -> dict[str, float]:
    """Four samples of up to 2048 tokens: of those that pass LONG tokens, the share that then does not repeat itself."""
    prompts = [answers.chat(form.format(place)) for place in PLACES.split(", ") for form in FORMS][:count]
    found = [each for seed in range(4) for each in answers(prompts, 2048, seed=seed, temperature=0.7, top_p=0.8)]
    given = [answers.tokenizer(each.text, add_special_tokens=False)["input_ids"] for each in found]
    tails = [answers.tokenizer.decode(ids[LONG:]).encode() for ids in given if len(ids) > LONG]
    steady = [len(tail) <= MOST_COMPRESSED * len(zlib.compress(tail)) for tail in tails]
    return share(steady) | {"mean_tokens": sum(map(len, given)) / len(given)}


# --- text ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def text_perplexity(model: Any, tokenizer: Any, folder: Path, length: int, tokens: int) -> float:
    """Of the second half of each window of WikiText-2."""
    text = "".join(row["page"] for row in rows(folder, "wikitext2", "validation"))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])
    total, count = 0.0, 0
    for start in range(0, len(ids) - length + 1, length):
        window_1T = ids[start : start + length].to(model.device)[None]
        logits_1KV = model(input_ids=window_1T, use_cache=False, logits_to_keep=length // 2 + 1).logits
        target = window_1T[0, -(length // 2) :]
        for piece in range(0, len(target), 1024):
            part = slice(piece, min(piece + 1024, len(target)))
            scores_KV = logits_1KV[0, :-1][part].float()
            total += torch.nn.functional.cross_entropy(scores_KV, target[part], reduction="sum").item()
        count += len(target)
    return math.exp(total / count)


def measure(path: str, options: argparse.Namespace) -> dict[str, Any]:
    bits: int | None = options.cache_bits
    found: dict[str, Any] = {"model": path, "cache_bits": bits}
    wrapped: Any
    served = Served(options.server, AutoTokenizer.from_pretrained(path), options.slots) if options.server else None
    if served:  # the model at `path`
        wrapped, tokenizer, reach = Prompted(served), served.tokenizer, max(options.lengths)
    else:
        model, tokenizer = load_model(path)
        wrapped = model if bits or isinstance(model, LolcatsForCausalLM) else keep_softmax(model)
        reach = int(getattr(model.config.get_text_config(), "max_position_embeddings", 8192))
        if not bits:
            sizes = {f"{n}": cache_bytes(wrapped.config, n, model.dtype) / 2**20 for n in (1024, 8192, 32768)}
            found |= {"exact_heads": wrapped.config.exact_heads, "cache_mib": sizes}
    seconds: dict[str, float] = {}
    folder: Path = options.data
    most = max(options.before, default=0) + 2048

    def timed(name: str, run: Any, *arguments: Any, **named: Any) -> None:
        # transformers' quantised cache rounds what it was given before: one pass, or a first token, sees nothing of it.
        if not re.match(options.only, name) or (bits and run in (text_perplexity, recall_accuracy, mmlu, labels)):
            return
        begin = time.time()
        try:
            found[name] = run(*arguments, **named)
        except Exception as error:  # the other numbers count
            found[name] = f"{type(error).__name__}: {error}"[:300]
        seconds[name] = round(time.time() - begin, 1)
        print(path, name, found[name], seconds[name], "s", flush=True)

    for length in options.lengths:
        if length <= reach:
            timed(f"perplexity_{length}", text_perplexity, wrapped, tokenizer, folder, length, options.text_tokens)
    haystack = str(folder / "wikitext2" / "haystack.jsonl.gz")
    lengths = tuple(length for length in options.lengths if length <= reach)
    kinds = ("needle", "needles")
    settings = {"kinds": kinds, "lengths": lengths, "samples": options.recall, "haystack": haystack}
    timed("recall", recall_accuracy, wrapped, tokenizer, **settings)
    answers = served or Answers(wrapped, tokenizer, options.slots, 4096, bits)
    timed("humaneval", humaneval, answers, folder, 0, options.programs)
    timed("gsm8k", gsm8k, answers, folder, 0, options.questions)
    timed("gsm8k_8shot", gsm8k, answers, folder, 8, options.questions)
    timed("mmlu", mmlu, answers, folder, options.mmlu)
    timed("long", long_answers, answers, options.questions)
    answers.shutdown()
    answers = served or Answers(wrapped, tokenizer, options.long_slots, max(most, 12288), bits)
    timed("labels_120shot", labels, answers, folder, 120, options.labels)
    timed("gsm8k_32shot", gsm8k, answers, folder, 32, options.questions)
    for before in options.before:
        timed(f"humaneval_{before}", humaneval, answers, folder, before, options.programs, options.front)
    answers.shutdown()
    return found | {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="results, written after each model")
    parser.add_argument("--only", default="", help="measures whose names begin as this regular expression says")
    parser.add_argument("--server", help="address of a running server of the model (vLLM's, for recall and perplexity)")
    parser.add_argument("--cache-bits", type=int, help="4, 8: of a softmax model's keys and values (hqq)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 8192])
    parser.add_argument("--before", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--front", type=int, default=0, help="which draw of code stands before programs")
    parser.add_argument("--programs", type=int, default=None)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--mmlu", type=int, default=1000)
    parser.add_argument("--labels", type=int, default=200)
    parser.add_argument("--recall", type=int, default=100)
    parser.add_argument("--text-tokens", type=int, default=200_000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--long-slots", type=int, default=64)
    options = parser.parse_args()
    results = []
    for path in options.models:
        results.append(measure(path, options))
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(
            json.dumps({"results": results, "settings": settings, "provenance": provenance()}, indent=1)
        )


if __name__ == "__main__":
    main()

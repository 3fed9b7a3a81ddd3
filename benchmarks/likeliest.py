"""How often a model's likeliest token is its original's, on the original's greedy answers, and their divergence.

    python benchmarks/likeliest.py ORIGINAL MODEL... --data FOLDER --text BOOKS --json FILE

FOLDER: as of ability.py; BOOKS: rows of text, .jsonl.gz. 48 prompts of a kind, answers of up to 200 tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import torch
from ability import Answers, examples, programs, rows
from torch import Tensor

from lolcats.conversion import keep_softmax
from lolcats.evaluation.load import load_model
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance

PROMPTS, TOKENS = 48, 200


def load(path: str) -> tuple[Any, Any]:
    model, tokenizer = load_model(path)
    return model if isinstance(model, LolcatsForCausalLM) else keep_softmax(model), tokenizer


@torch.no_grad()
def scores(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """[L, V] log-probabilities of the answer's L tokens."""
    ids = torch.tensor([prompt + answer], device=model.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original")
    parser.add_argument("models", nargs="+")
    for name in ("--data", "--text", "--json"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    data = options.data
    original, tokenizer = load(options.original)
    answers = Answers(original, tokenizer, 16, 8192, None)
    code, sums = rows(data, "humaneval", "test")[::3][:PROMPTS], rows(data, "gsm8k", "test")[500 : 500 + PROMPTS]
    with gzip.open(options.text, "rt", encoding="utf-8") as stream:
        texts = [json.loads(line)["text"].split() for line, _ in zip(stream, range(PROMPTS), strict=False)]
    shown = examples(data, 8)
    prompts = {
        "code": programs(answers, code, 0, 7),
        "code behind 4k": programs(answers, code, 4096, 7),
        "sums": [answers.chat(row["question"]) for row in sums],
        "sums, 8 examples": [answers.chat(row["question"], "", shown) for row in sums],
        "text": [
            answers.chat(f"{' '.join(words[:1100])}\n\nSummarise the text above in five sentences.") for words in texts
        ],
    }
    given = {kind: [result.token_ids[:TOKENS] for result in answers(each, TOKENS)] for kind, each in prompts.items()}
    pairs = {kind: list(zip(each, given[kind], strict=True)) for kind, each in prompts.items()}
    expected = {kind: [scores(original, *pair).to("cpu", torch.float16) for pair in pairs[kind]] for kind in pairs}
    answers.shutdown()
    del original, answers
    torch.cuda.empty_cache()
    found = []
    for path in options.models:
        model, _ = load(path)
        for kind, each in pairs.items():
            same, divergence, tokens = 0, 0.0, sum(map(len, given[kind]))
            for pair, saved in zip(each, expected[kind], strict=True):
                teacher_LV, student_LV = saved.to(model.device).float(), scores(model, *pair)
                same += int((student_LV.argmax(-1) == teacher_LV.argmax(-1)).sum())
                divergence += float((teacher_LV.exp() * (teacher_LV - student_LV)).sum())
            means = {"agree": 100 * same / tokens, "kl": divergence / tokens}
            found.append({"model": path, "kind": kind, "tokens": tokens} | means)
            print(found[-1], flush=True)
        options.json.write_text(json.dumps({"provenance": provenance(), "rows": found}, indent=1))
        del model


if __name__ == "__main__":
    main()

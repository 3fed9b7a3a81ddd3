"""What stands before a question: other code in front of any task's, or a hundred examples of a classification."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

LABELS = "ABCDEF"
TOPICS_SHOTS, TOPICS_QUESTIONS = 120, 200
LONGEST_QUESTION = 400  # characters


def other_code(tokenizer: Any, tokens: int, seed: int) -> str:
    """Modules of Python's standard library, of so many tokens."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(files)
    parts: list[str] = []
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf-8", errors="ignore"), add_special_tokens=False, verbose=False)
        kept = ids["input_ids"][:tokens]
        parts.append(f"```python\n# {file.name}\n{tokenizer.decode(kept)}\n```\n")
        tokens -= len(kept)
        if tokens < 50:
            break
    return "These files are part of a project:\n" + "\n".join(parts) + "\n"


def put_behind_code(task: Any, tokenizer: Any, tokens: int) -> None:
    """Let each question of an lm-eval task, but not its examples, follow that many tokens of other code."""
    ask = task.doc_to_text
    numbers = {ask(doc): number for number, doc in enumerate(task.eval_docs)}

    def text(doc: dict[str, Any], *args: Any) -> str:
        asked = ask(doc, *args)
        return other_code(tokenizer, tokens, numbers[asked]) + asked if asked in numbers else asked

    task.doc_to_text = text


def topics(questions: list[dict[str, Any]] | None, shots: int) -> dict[str, Any]:
    """Many-shot classification as an lm-eval task's definition: MMLU questions (None: from the hub) of six subjects,
    whose names are hidden behind letters, so that only the examples tell what a letter means."""
    import datasets

    questions = questions or list(datasets.load_dataset("cais/mmlu", "all", split="test"))
    subjects = sorted({row["subject"] for row in questions})
    rows = []
    for index in range(TOPICS_QUESTIONS):
        draw = random.Random(index)
        chosen = draw.sample(subjects, len(LABELS))
        pool = [(x["question"], LABELS[chosen.index(x["subject"])]) for x in questions if x["subject"] in chosen]
        *examples, (asked, label) = draw.sample([pair for pair in pool if len(pair[0]) < LONGEST_QUESTION], shots + 1)
        text = "".join(f"{question}\nGroup: {group}\n\n" for question, group in examples)
        rows.append({"text": f"Each question belongs to a group.\n\n{text}{asked}", "label": label})
    return {
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "\n",
        "gen_prefix": "Group:",
        "generation_kwargs": {"until": [], "max_gen_toks": 2, "do_sample": False},
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "process_results": lambda row, results: {"acc": float(results[0].strip()[:1] == row["label"])},
        "num_fewshot": 0,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
    }

"""Multiple-choice questions in MMLU's few-shot format, as training data.

arXiv:2410.10254 (appendix, "Matching Linearizing Data to Downstream Task") trains on CommonsenseQA in this form:
several questions with their lettered choices and answers, the last answer being what is to be predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset

from lolcats.data.templates import Document
from lolcats.errors import UserError

QUESTIONS = 5  # in one sample, the last one included
HEADER = "The following are multiple choice questions (with answers) about common sense.\n\n"
COLUMNS = ("question", "choices", "answerKey")


def few_shot(rows: Dataset, seed: int, questions: int = QUESTIONS) -> Dataset:
    """One row {prompt, answer} for each of `rows`: the question after `questions - 1` others with their answers.

    The others are drawn from the same rows, without the question itself. Validation rows therefore see no
    training question, and the other way round, if the two are split before.

    Args:
        rows: question, choices {label, text}, answerKey, as in CommonsenseQA and ARC.

    Raises:
        UserError: too few rows, or a row of another form.
    """
    if len(rows) < questions:
        raise UserError(
            f"multiple-choice samples hold {questions} questions, and there are only {len(rows)} rows in the training"
            " or validation split: give more, or raise data.validation_rows"
        )
    shown, answers = [], []
    for number, row in enumerate(rows.select_columns(list(COLUMNS))):
        text, answer = _question(row, number)
        shown.append(text)
        answers.append(answer)
    samples: dict[str, list[str]] = {"prompt": [], "answer": []}
    for index in range(len(shown)):
        generator = np.random.default_rng([seed, index])
        others = generator.choice(len(shown) - 1, size=questions - 1, replace=False)
        picked = [int(other) + (other >= index) for other in others]
        examples = "".join(f"{shown[other]} {answers[other]}\n\n" for other in picked)
        samples["prompt"].append(HEADER + examples + shown[index])
        samples["answer"].append(f" {answers[index]}")
    return Dataset.from_dict(samples)


def template(row: dict[str, Any]) -> list[Document]:
    """Rows of `few_shot`; the last answer's letter is the label."""
    return [Document([(row["prompt"], False), (row["answer"], True)])]


def _question(row: dict[str, Any], number: int) -> tuple[str, str]:
    """The question with lettered choices up to "Answer:", and the right letter."""
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    if row["answerKey"] not in labels:
        raise UserError(
            f"row {number} (counted from 0): answerKey {row['answerKey']!r} is none of the choices' labels"
            f" {list(labels)}; use a split with answers"
        )
    letters = "ABCDEFGHIJ"[: len(labels)]
    lines = [row["question"].strip(), *(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))]
    return "\n".join([*lines, "Answer:"]), letters[labels.index(row["answerKey"])]

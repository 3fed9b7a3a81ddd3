"""A tiny model that reads any text, its linearized copy, and records of the paper's six tasks."""

import json
from pathlib import Path
from typing import Any

import pytest
from family_models import build, linearized
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "Question: Which river is the longest? Answer: the grass is green and the sky is blue. The sun is yellow. "
    "The following are multiple choice questions (with answers) about rivers. There is an important piece of info "
) * 3
SUBJECTS = ("anatomy", "astronomy")


def _choices(index: int) -> dict[str, Any]:
    words = ["granite", "a long river", "warm air above the sea", "the moon", "iron"][: 3 + index % 3]
    question = f"Which of these is number {index} of the things that float on water?"
    choices = {"text": words, "label": list("ABCDE")[: len(words)]}
    return {"id": f"q{index}", "question": question, "choices": choices, "answerKey": "ABC"[index % 3]}


def _piqa(index: int) -> dict[str, Any]:
    stuffed, filled = "stuff them with newspaper and keep them near a stove", f"fill them with water {index} times"
    return {"goal": f"To dry {index + 2} wet boots quickly", "sol1": stuffed, "sol2": filled, "label": index % 2}


def _hellaswag(index: int, word: str) -> dict[str, Any]:
    first, second = "A woman puts flour into a bowl.", f"she {word}"
    endings = ["adds water and stirs it.", "throws the bowl out of the window [title] and leaves.", "sings."]
    endings.append(f"rides a horse over {index} hills, slowly.")
    context = {"ctx_a": first, "ctx_b": second, "ctx": f"{first} {second}", "activity_label": "Baking bread"}
    return context | {"ind": index, "endings": endings, "source_id": "made~up", "label": str(index % 4)}


def _winogrande(index: int, first: str, second: str, size: str) -> dict[str, Any]:
    sentence = f"The {first} did not fit into the {second} because the _ was too {size}."
    return {"sentence": sentence, "option1": first, "option2": second, "answer": "12"[index % 2]}


def _mmlu(subject: str, index: int) -> dict[str, Any]:
    question, choices = f"In {subject}, what comes after part {index}?", [f"part {index + 1 + n}" for n in range(4)]
    return {"question": question, "subject": subject, "choices": choices, "answer": (index * 3) % 4}


def _function(index: int) -> dict[str, Any]:
    name, stub = f"times_{index}", f'def times_{index}(x):\n    """x times {index}."""\n'
    test = f"def check(f):\n    assert f(3) == {3 * index}"
    return {"task_id": name, "prompt": stub, "entry_point": name, "test": test}


def _asserted(index: int) -> dict[str, Any]:
    asserts = [f"assert times_{index}({n}) == {n * index}" for n in range(3)]
    text = f"Write times_{index}, which multiplies by {index}."
    return {"task_id": index, "text": text, "code": "", "test_list": asserts}


def _sum(index: int) -> dict[str, Any]:
    return {"question": f"What is {index} + 1,000?", "answer": f"It is <<{index}+1000>>1,00{index}.\n#### 1,00{index}"}


def _rows() -> dict[str, list[dict[str, Any]]]:
    pairs = [("lamp", "box", "big"), ("chair", "van", "small"), ("tent", "sack", "wide"), ("oar", "boat", "long")]
    words = ["then", "smiles and", "slowly", "turns and", "stops and"]
    return {
        "piqa/validation": [_piqa(index) for index in range(6)],
        "arc_easy/test": [_choices(index) for index in range(5)],
        "arc_challenge/test": [_choices(index) for index in range(4)],
        "hellaswag/validation": [_hellaswag(index, word) for index, word in enumerate(words)],
        "winogrande/validation": [_winogrande(index, *pair) for index, pair in enumerate(pairs)],
        "humaneval/test": [_function(index) for index in range(3)],
        "mbpp/test": [_asserted(index) for index in range(3)],
        "gsm8k/test": [_sum(index) for index in range(3)],
        "gsm8k/train": [_sum(index) for index in range(3, 9)],
        "mmlu/dev": [_mmlu(subject, index) for subject in SUBJECTS for index in range(5)],
        "mmlu/test": [_mmlu(name, index) for n, name in enumerate(SUBJECTS) for index in range(10, 14 + n)],
    }


@pytest.fixture(scope="session")
def eval_data(tmp_path_factory) -> Path:
    """A folder for --data-dir."""
    folder = tmp_path_factory.mktemp("eval-data")
    for name, rows in _rows().items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level BPE: every text is tokens, and several texts share beginnings of tokens."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    plain.train_from_iterator([CORPUS], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
    wrapped.pad_token = "<eos>"
    return wrapped


def _llama() -> Any:
    special = {"bos_token_id": None, "eos_token_id": 0}
    return build("llama3", vocab_size=320, max_position_embeddings=4096, **special)


@pytest.fixture(scope="session")
def softmax_model() -> Any:
    return _llama()


@pytest.fixture(scope="session")
def linear_model() -> Any:
    """Linearized, with a window much smaller than the prompts."""
    return linearized(_llama(), window_size=8)


@pytest.fixture(scope="session")
def hybrid_model() -> Any:
    """Linearized but for one layer."""
    return linearized(_llama(), window_size=8, exact=[0, "1.1"])


@pytest.fixture(params=["softmax", "linear", "hybrid"])
def any_model(request) -> Any:
    return request.getfixturevalue(f"{request.param}_model")

"""A tokenizer with one token per byte, so that expected tokens can be read off the text."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE, eos: str = "<|eos|>") -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
    )
    wrapped.chat_template = chat_template
    return wrapped


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """One that no test changes."""
    return make_tokenizer()


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def new_tokenizer() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """write_rows(name, rows) -> path of a JSON lines file, gzipped if the name says so."""

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        data = text.encode()
        file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(file)

    return write


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps every test away from the user's caches."""
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"

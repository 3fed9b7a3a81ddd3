"""A tiny linearized model with a tokenizer of bytes, and what transformers generates with it."""

import sys
from typing import Any

import pytest
import torch
from family_models import COMMON, FAMILIES, randomised
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert

SPECIAL = ["<eos>", "<user>", "<assistant>", "<end>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 256
# Layers of both kinds, with and without a native window: a linear and a softmax layer of each.
HYBRID: dict[str, Any] = {
    "family": "gemma2",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention": {"exact": [2, 3, "1.0"]},
}
# Exact heads with a window, in a layer of both kinds and in one of their own.
BOUNDED: dict[str, Any] = {"attention": {"exact": ["0.1", 1], "exact_window": 5, "sinks": 2}}
# A softmax layer that attends within chunks, and a linear one.
CHUNKED: dict[str, Any] = {"family": "llama4", "attention_chunk_size": 80}


def make_tokenizer() -> Any:
    """256 bytes and the special tokens; characters outside ASCII are several tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    tokenizer.chat_template = CHAT_TEMPLATE
    assert tokenizer.eos_token_id == EOS
    return tokenizer


def make_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float64, attention: dict | None = None, **changes: Any
) -> Any:
    """A linearized random model. float64: no rounding makes two ways of computing a token differ."""
    torch.manual_seed(5)
    model_type, difference = FAMILIES.get(family, (family, {}))
    shape = {"vocab_size": 256 + len(SPECIAL), "max_position_embeddings": 256}
    special = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **(COMMON | difference | shape | special | changes))
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    # An end token that comes often enough for tests.
    base.get_output_embeddings().weight.data[EOS] *= 1.2
    model = convert(base, AttentionConfig(**({"window": "terraced", "window_size": 3} | (attention or {}))))
    return randomised(model).to(dtype)


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (length,), generator=generator).tolist()


@torch.no_grad()
def greedy(model: Any, tokens: list[int], new: int) -> list[int]:
    """What transformers' generate() answers."""
    ids = torch.tensor([tokens])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=EOS
    )
    return output[0, len(tokens) :].tolist()


# --- fixtures, which conftest.py imports ------------------------------------------------------------------------


@pytest.fixture(scope="session", name="kit")
def kit_fixture() -> Any:
    """This module."""
    return sys.modules[__name__]


@pytest.fixture(scope="session", name="tokenizer")
def tokenizer_fixture() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session", name="model")
def model_fixture() -> Any:
    return make_model()

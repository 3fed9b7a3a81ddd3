"""A tiny base model, for tests and for scripts without fixtures."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_base(
    folder: Path, words: list[str], positions: int = 128, chat_template: str | None = None, **shape: int
) -> None:
    """A random 2-layer Llama with a word-level tokenizer."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *words])}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = SHAPE | HEADS | {"vocab_size": len(vocabulary), "max_position_embeddings": positions} | shape
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=1))
    for parameter in model.parameters():  # larger weights: attention that is far from uniform
        if parameter.dim() > 1:
            parameter.data.mul_(6.0)
    model.save_pretrained(folder)


def write_demo_base(folder: Path) -> None:
    """One that knows some words of the package's texts, and has a chat template."""
    from lolcats.data.retrieval import haystack_text

    template = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    write_base(folder, sorted(set(haystack_text("demo", "train")[:20_000].split())), 512, template)

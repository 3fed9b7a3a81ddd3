"""Uses an installed lolcats in an empty folder, as somebody without the repository would. Run by `make wheel`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lolcats
from lolcats.data.retrieval import haystack_text

assert "site-packages" in lolcats.__file__, lolcats.__file__
words = sorted(set(haystack_text("demo", "train")[:20_000].split()))
vocabulary = {word: number for number, word in enumerate(["<unk>", "<eos>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained("base")
config = LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("base")

SHORT = "transfer.max_steps=1", "adjust.max_steps=1", "data.sequence_length=64", "data.validation_sequences=2"
settings = [word for setting in SHORT for word in ("--set", setting)]
for command in (
    "lolcats --help",
    "lolcats recipes",
    "lolcats models",
    "lolcats linearize base --recipe lolcats-plus --data demo --device cpu -o out",
    "lolcats generate out --prompt cell --max-new-tokens 4",
):
    print("$", command, flush=True)
    more = settings if "linearize" in command else []
    subprocess.run([*command.split(), *more], check=True)

from transformers import AutoModelForCausalLM  # noqa: E402

model = AutoModelForCausalLM.from_pretrained("out")
assert type(model).__name__ == "LolcatsForCausalLM", type(model)
assert model.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 7)
assert Path("out/modeling_lolcats.py").is_file()
print("the installed package works")

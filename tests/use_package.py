"""Uses an installed lolcats in an empty folder, as somebody without the repository would. Run by `make wheel`."""

import subprocess
from pathlib import Path

import torch
from tiny_base import write_demo_base

import lolcats

assert "site-packages" in lolcats.__file__, lolcats.__file__
write_demo_base(Path("base"))

SHORT = "transfer.max_steps=1", "adjust.max_steps=1", "data.validation_sequences=2"
WINDOW = "attention.window_size=8", "data.sequence_length=64"
settings = [word for setting in SHORT + WINDOW for word in ("--set", setting)]
for command in (
    "lolcats --help",
    "lolcats recipes",
    "lolcats linearize base --recipe lolcats-linear --data demo --device cpu -o out",
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

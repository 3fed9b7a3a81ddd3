"""Two steps of TRL's trainers on a linearized model."""

import math

import datasets
import pytest
import torch
import trl
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
QUICK = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True}
QUICK |= {"report_to": "none", "save_strategy": "no", "bf16": False}


@pytest.fixture
def model(model_dir):
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    return convert(base, AttentionConfig(window="sliding", window_size=4, exact=("0.1",)))


@pytest.fixture
def tokenizer(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.pad_token = "<unk>"
    return tokenizer


def train(trainer, model, config, rows, tokenizer, lora=LORA, **options):
    """Losses of two updates, which are numbers; what is trained has changed."""
    options |= {"processing_class": tokenizer, "peft_config": lora}
    trainer = trainer(model=model, args=config, train_dataset=datasets.Dataset.from_dict(rows), **options)
    model = trainer.model
    trained = {name: x.detach().clone() for name, x in model.named_parameters() if x.requires_grad}
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert any(not torch.equal(x, trained[name]) for name, x in model.named_parameters() if name in trained)
    return losses


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_supervised(model, tokenizer, tmp_path, packing, lora):
    rows = {"text": [" ".join(f"w{(i * j) % 60}" for j in range(3, 12)) for i in range(24)]}
    config = trl.SFTConfig(output_dir=str(tmp_path), max_length=24, packing=packing, **QUICK)
    losses = train(trl.SFTTrainer, model, config, rows, tokenizer, lora)
    assert losses[0] > 1


def test_preferences(model, tokenizer, tmp_path):
    rows = {"prompt": ["w1 w2 w3", "w4"] * 6, "chosen": [" w5 w6", " w7"] * 6, "rejected": [" w8", " w9 w10 w11"] * 6}
    config = trl.DPOConfig(output_dir=str(tmp_path), max_length=24, **QUICK)
    losses = train(trl.DPOTrainer, model, config, rows, tokenizer)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)  # policy and reference are one


def test_rewards(model, tokenizer, tmp_path):
    config = trl.GRPOConfig(output_dir=str(tmp_path), max_completion_length=6, num_generations=2, beta=0.0, **QUICK)

    def length(completions, **_):
        return [float(len(set(text.split()))) for text in completions]

    train(trl.GRPOTrainer, model, config, {"prompt": ["w1 w2 w3", "w4"] * 6}, tokenizer, reward_funcs=length)

"""A tiny Llama and its counts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lolcats.config import AdjustSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.plan.shape import model_shape, shape_of


class Tiny:
    """Model and counts for a number of layers."""

    def __init__(self, layers: int, exact: tuple[int, ...] = (), **changes: int) -> None:
        config = LlamaConfig(
            **{
                "hidden_size": 32,
                "intermediate_size": 96,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 128,
                "attention_dropout": 0.0,
            }
            | changes
        )
        attention = AttentionConfig(window_size=8, exact=list(exact))
        self.adjust = AdjustSection(lora_rank=4)
        self.shape = shape_of(config, attention, self.adjust)
        torch.manual_seed(0)
        self.model = convert(AutoModelForCausalLM.from_config(config).eval(), attention)


@pytest.fixture
def tiny():
    return Tiny


@pytest.fixture(scope="session")
def known_shape():
    """Counts of a named shape, made once: the large ones take seconds."""
    return cache(lambda name: model_shape(name, AttentionConfig(), AdjustSection()))

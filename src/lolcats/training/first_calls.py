"""The first calls of a run, on a model of few layers: what remains of them are Triton's kernels, compiled on disk.

Which kernels a run launches follows from the shapes of a layer and of a batch, and not from weights, data or the number
of layers. So these calls are the run's own code, on random weights and tokens.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lolcats.config import DataSection, LinearizeConfig
from lolcats.conversion import convert, fit_positions
from lolcats.data import PackedDataset
from lolcats.data.build import moved
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.call import SOFTMAX
from lolcats.modeling.fused import fused_kernels
from lolcats.modeling.loading import load_config, resolve_device, resolve_dtype
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.finetune import AdjustStage

MEMORY_SHARE = 0.1
"""Of the GPU's memory: the run has it at the same time."""


def first_calls(config: LinearizeConfig, part: str) -> None:
    """Call what a part of the run calls, with batches as it has them.

    Args:
        part: "perplexity", of the teacher and the untrained model; or a stage, "transfer" or "adjust".
    """
    device = resolve_device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, device.index)
    model = small_model(config, device)
    if part == "perplexity":
        size = config.adjust.micro_batch_size
        data = random_data(config.data, model, size)
        for call in (SOFTMAX, None):
            dataset_perplexity(model, data, batch_size=size, attention_call=call)
        return
    section = config.transfer if part == "transfer" else config.adjust
    data = random_data(config.data_of(part), model, section.micro_batch_size)
    stage: TransferStage | AdjustStage
    if part == "transfer":
        stage = TransferStage(model, config.transfer, data)
    else:
        stage = AdjustStage(model, config.adjust, data)
    with fused_kernels(model, section.fused_kernels):
        stage.micro_step(data.batch(list(range(section.micro_batch_size))), 1.0)
        stage.evaluate()


def small_model(config: LinearizeConfig, device: torch.device) -> LolcatsForCausalLM:
    """As many of the model's layers as are needed to have each kind, linearized, with random weights."""
    shape = few_layers(load_config(config.model))
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(
            shape, dtype=resolve_dtype(config.model.dtype, device), trust_remote_code=config.model.trust_remote_code
        )
    return convert(base.eval(), replace(config.attention, exact=()))


def few_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with the first layers alone, up to one of each kind."""
    config = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None) or [None]
    before, layers = config.num_hidden_layers, 1 + max(kinds.index(kind) for kind in set(kinds))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    return config


def random_data(section: DataSection, model: LolcatsForCausalLM, size: int) -> PackedDataset:
    """A batch of `size` sequences and half a one: a last batch is mostly smaller. Every second token is a label."""
    length, vocabulary = section.sequence_length, model.config.text_config.vocab_size
    ids_NT = np.random.default_rng(0).integers(0, vocabulary, (size + max(size // 2, 1), length), dtype=np.int32)
    documents = np.zeros_like(ids_NT) if section.reset_documents else None
    labels_NT = np.broadcast_to(np.arange(length) % 2 == 1, ids_NT.shape)
    return moved(PackedDataset(ids_NT, labels_NT, documents), fit_positions(section, model.model))

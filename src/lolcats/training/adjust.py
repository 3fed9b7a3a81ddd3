"""Stage 2, low-rank adjusting: the linearized model learns to predict the next token again.

(arXiv:2410.10254, algorithm 2.) Optionally part of the loss is the divergence from the softmax teacher:
the same weights with softmax attention on and the adapters off.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import kl_div

from lolcats.config import AdjustSection
from lolcats.data import PackedDataset
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.training.lora import add_lora


class AdjustStage:
    """The `Stage` of low-rank adjusting (or full finetuning); see `lolcats.training.loop`."""

    name = "adjust"
    metric = "perplexity"

    def __init__(self, model: LolcatsForCausalLM, config: AdjustSection, validation: PackedDataset) -> None:
        self.config, self.validation, self.linearized = config, validation, model
        self.autocast_dtype: torch.dtype | None = None
        self.model: LolcatsForCausalLM | PeftModel
        if config.method == "lora":
            model.requires_grad_(False)
            self.model = add_lora(model, config)
        else:
            # Updates of 1e-4 vanish in bfloat16: master weights in float32, matrix products as before.
            if model.dtype != torch.float32:
                self.autocast_dtype = model.dtype
            model.float()
            self.model = model.requires_grad_(True)
        for _, module in model.linear_layers():
            module.requires_grad_(config.train_feature_maps)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        return [{name: p for name, p in self.model.named_parameters() if p.requires_grad}]

    def micro_step(self, batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        """Mean over sequences of the mean over a sequence's labels: independent of the micro-batch size."""
        batch = {name: tensor.to(self.linearized.device) for name, tensor in batch.items()}
        labels = batch.pop("labels")[:, 1:]
        # Before the forward pass is queued: finding the positions waits for the GPU.
        sequence_L, position_L = (labels != -100).nonzero(as_tuple=True)
        weight_L = _weights(sequence_L, len(labels))
        self.model.train()
        result: dict[str, Any] = {}
        # The backward pass stays inside: gradient checkpointing runs the layers again in the same mode.
        with self._mode():
            logits_LV = self._logits(batch, sequence_L, position_L)
            loss = cross_entropy(logits_LV, labels[sequence_L, position_L], reduction="none") @ weight_L
            if self.config.distill_factor > 0:
                divergence = self._divergence(batch, sequence_L, position_L, logits_LV) @ weight_L
                result = {"cross_entropy": loss.detach(), "divergence": divergence.detach()}
                loss = (1 - self.config.distill_factor) * loss + self.config.distill_factor * divergence
            (loss * scale).backward()
        return {"loss": loss.detach(), **result}

    def evaluate(self) -> dict[str, Any]:
        self.model.eval()
        with self._mode(), self._autocast():
            return dataset_perplexity(self.model, self.validation, batch_size=self.config.micro_batch_size)

    def state(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.blocks()[0].items()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.blocks()[0].items():
            parameter.copy_(tensors[name])

    def _mode(self):
        return self.linearized.attention_mode("softmax" if self.config.softmax_control else "linear")

    def _autocast(self):
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.linearized.device.type, dtype=self.autocast_dtype)

    def _logits(self, batch: dict[str, Tensor], sequence_L: Tensor, position_L: Tensor) -> Tensor:
        """[L, V] float32 logits from which the labels at the given positions are predicted."""
        with self._autocast():
            return self.model(**batch, use_cache=False).logits[sequence_L, position_L].float()

    def _divergence(
        self, batch: dict[str, Tensor], sequence_L: Tensor, position_L: Tensor, logits_LV: Tensor
    ) -> Tensor:
        """[L] KL(softmax teacher || student) at every label, times temperature squared."""
        temperature = self.config.distill_temperature
        adapters_off = self.model.disable_adapter() if isinstance(self.model, PeftModel) else nullcontext()
        with torch.no_grad(), adapters_off, self.linearized.attention_mode("softmax"):
            teacher_LV = self._logits(batch, sequence_L, position_L)
        divergence_LV = kl_div(
            (logits_LV / temperature).log_softmax(-1),
            (teacher_LV / temperature).log_softmax(-1),
            reduction="none",
            log_target=True,
        )
        return temperature**2 * divergence_LV.sum(-1)


def _weights(sequence_L: Tensor, sequences: int) -> Tensor:
    """[L] weight of each label, so that the weighted sum is the mean over sequences of their means."""
    count_B = torch.bincount(sequence_L, minlength=sequences)
    return 1.0 / (count_B[sequence_L] * sequences)

from __future__ import annotations

import pytest
import torch

from lolcats.config import AdjustSection, TransferSection
from lolcats.training.device import explain_out_of_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
def test_recognised(error):
    assert explain_out_of_memory(error, "adjust", 1, AdjustSection(), 1024, CPU) is not None


def test_other_errors_are_not_explained():
    assert explain_out_of_memory(RuntimeError("shape"), "adjust", 1, AdjustSection(), 1024, CPU) is None


def explain(config, stage):
    return explain_out_of_memory(MemoryError(), stage, 7, config, 1024, CPU) or ""


def test_adjust():
    text = explain(AdjustSection(batch_size=8, micro_batch_size=4), "adjust")
    assert "stage adjust, step 7" in text
    assert "micro_batch_size=4, sequence_length=1024, gradient_checkpointing=false" in text
    assert "lower adjust.micro_batch_size (a divisor of batch_size=8" in text
    assert "adjust.gradient_checkpointing=true" in text
    assert "lower data.sequence_length" in text
    assert "xent" not in text


def test_what_is_at_its_lowest_is_not_advised():
    config = AdjustSection(batch_size=8, micro_batch_size=1, gradient_checkpointing=True)
    text = explain(config, "adjust")
    assert "micro_batch_size=1, sequence_length=1024, gradient_checkpointing=true" in text
    assert "lower adjust.micro_batch_size" not in text
    assert "set adjust.gradient_checkpointing" not in text


def test_transfer_with_attention_weights():
    text = explain(TransferSection(xent_factor=1.0), "transfer")
    assert "transfer.xent_factor=0" in text
    assert "gradient_checkpointing" not in text

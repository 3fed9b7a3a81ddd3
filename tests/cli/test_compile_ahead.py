"""Kernels compiled ahead: who gets them, and that nothing depends on them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lolcats.cli import compile_ahead as module
from lolcats.cli.compile_ahead import CompileAhead, compile_ahead
from lolcats.config import LinearizeConfig
from lolcats.training.first_calls import few_layers, first_calls


@pytest.fixture
def config(model_dir):
    return LinearizeConfig.from_dict(
        {
            "model": {"path": str(model_dir), "device": "cpu"},
            "data": {"sources": [{"path": "demo"}], "sequence_length": 32},
            "attention": {"window_size": 8, "feature_dim": 4},
            "transfer": {"batch_size": 4, "micro_batch_size": 2, "select_by": "perplexity"},
            "adjust": {"batch_size": 4, "micro_batch_size": 2, "lora_rank": 2},
        }
    )


@pytest.mark.parametrize("part", ["perplexity", "transfer", "adjust"])
@pytest.mark.parametrize("data", [{}, {"reset_documents": True}, {"position_offset": "auto"}])
def test_first_calls_run(config, part, data):
    first_calls(config.model_copy(update={"data": config.data.model_copy(update=data)}), part)


def test_layers_of_each_kind():
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(num_hidden_layers=4, layer_types=kinds)
    few = few_layers(config)
    assert (few.num_hidden_layers, few.layer_types) == (3, kinds[:3])
    assert config.num_hidden_layers == 4


def test_processes_end_whatever_happens(config):
    """Without a GPU one runs through; one that fails, and one that takes longer, change nothing."""
    with CompileAhead(config, ["transfer", "no such part"]) as kernels:
        began = time.monotonic()
        kernels.wait("adjust")
        assert time.monotonic() - began < 1.0
        kernels.wait("transfer")
        assert kernels.processes["transfer"].returncode == 0
        kernels.wait("no such part")
        assert kernels.processes["no such part"].returncode == 1
    broken = config.model_copy(update={"model": config.model.model_copy(update={"path": "/no/such/model"})})
    with CompileAhead(broken, ["adjust"]) as kernels:
        pass
    assert kernels.processes["adjust"].returncode not in (0, None)


def test_only_where_there_is_a_gpu_to_compile_for(config, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(module, "CompileAhead", lambda _, parts: started.append(parts))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 16)
    for name in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOLCATS_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(module.sys.modules, "torch")
    (tmp_path / "nvidia0").touch()
    gpus = str(tmp_path / "nvidia[0-9]*")

    def parts(pattern=gpus, **changes):
        compile_ahead(LinearizeConfig.from_dict(config.model_dump(mode="json") | changes), pattern)
        return started.pop()

    anywhere = {"model": config.model.model_dump(mode="json") | {"device": "auto"}}
    assert parts(**anywhere) == ["perplexity", "transfer", "adjust"]
    assert parts() == []  # on the CPU
    assert parts(str(tmp_path / "no"), **anywhere) == []
    assert parts(**anywhere, adjust={"enabled": False}) == ["perplexity", "transfer"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parts(**anywhere) == []


@pytest.mark.parametrize(("modes", "shared"), [("Default\nDefault", True), ("Exclusive_Process", False), (None, False)])
def test_no_gpu_is_taken_from_the_run(monkeypatch, tmp_path, modes, shared):
    if modes is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n/usr/bin/printf '{modes}\\n'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.is_shared() is shared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_finds_its_kernels(config, model_dir, data_file, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path / "data"))
    values = config.model_dump(mode="json")
    folder = shutil.copytree(model_dir, tmp_path / "model")
    shape = AutoConfig.from_pretrained(folder)
    shape.head_dim = 16  # the least that the kernels of attention take
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    values["model"] |= {"path": str(folder), "device": "cuda"}
    values["attention"]["feature_dim"] = 8
    values["data"] |= {"sources": [{"path": str(data_file)}], "validation_rows": 10, "loss_on": "all"}
    config = LinearizeConfig.from_dict(values)
    parts = ["perplexity", "transfer", "adjust"]
    with CompileAhead(config, parts) as kernels:
        for part in parts:
            kernels.wait(part)
            assert kernels.processes[part].returncode == 0
    before = kernel_names(tmp_path / "triton")
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    command = [sys.executable, "-m", "lolcats", "linearize", "--recipe", str(tmp_path / "run.yaml")]
    subprocess.run([*command, "-o", str(tmp_path / "out")], check=True)
    new = kernel_names(tmp_path / "triton") - before
    assert len(before) > 10
    assert sum(new.values()) <= len(before) // 5, new


def kernel_names(cache):
    """Of the kernels compiled, each with how many times."""
    return Counter(file.name for file in cache.glob("*/*.cubin"))

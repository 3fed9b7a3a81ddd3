"""Base models whose checkpoints are quantised, in kinds made by hand or by the packages that are installed."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lolcats.checkpoint.write import dense_weights, whole_weights
from lolcats.config import AdjustSection, AttentionConfig, LinearizeConfig, ModelSection
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.loading import load_base_model
from lolcats.modeling.quantised import Quantisation, quantised_linears, refuse_without_gradient
from lolcats.run import check_weights
from lolcats.training.lora import adapted_projections

BLOCK = 16


def fp8(weight):
    """Fine-grained FP8: 8-bit floats and a scale for each block."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    stored = {"weight": codes.view_as(weight), "weight_scale_inv": scale}
    return stored, (codes.float() * scale[:, None, :, None]).view_as(weight)


def int8(weight):
    """compressed-tensors: integers and a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


ROUNDED = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
BY_HAND = {
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}),
    "compressed-tensors": (
        int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": ROUNDED,
                    "input_activations": ROUNDED | {"dynamic": True, "strategy": "token"},
                }
            },
        },
    ),
}
BITSANDBYTES = {"bitsandbytes, 4 bits": {"load_in_4bit": True}, "bitsandbytes, 8 bits": {"load_in_8bit": True}}


@pytest.fixture
def quantised(model_dir, tmp_path):
    """build(kind) -> a folder, and the linear layers' weights that transformers computes with, by name."""

    def build(kind):
        config = AutoConfig.from_pretrained(model_dir)
        config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16  # bitsandbytes needs 64 columns
        folder = tmp_path / "base"
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
        if kind in BITSANDBYTES:
            settings = BitsAndBytesConfig(**BITSANDBYTES[kind])
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings).save_pretrained(folder)
            exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).dequantize().state_dict()
            return folder, {name: tensor.float() for name, tensor in exact.items() if "_proj." in name}
        quantise, settings = BY_HAND[kind]
        stored, exact = {}, {}
        for name, weight in load_file(folder / "model.safetensors").items():
            if "_proj." in name:
                parts, exact[name] = quantise(weight)
                stored |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
            else:
                stored[name] = weight
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | {"quantization_config": settings}))
        return folder, exact

    return build


@pytest.mark.parametrize("kind", [*BY_HAND, *BITSANDBYTES])
def test_end_to_end(run, quantised, tmp_path, kind):
    """Written are the weights that training saw, as plain tensors, with LoRA in the projections."""
    package = kind.partition(",")[0].replace("-", "_")
    if kind != "fp8" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder, exact = quantised(kind)
    loaded, _ = load_base_model(ModelSection(path=str(folder), device="cpu"))
    assert bool(quantised_linears(loaded)) == (kind in BITSANDBYTES)  # the others are dequantised while loading
    report = run(tmp_path / "out", {"model": {"path": str(folder)}})
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in made.values()} == {torch.float32}
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    for name, weight in exact.items():
        # LLM.int8 gives its scales in half precision
        same = torch.allclose(made[f"model.{name}"], weight, rtol=1e-3, atol=1e-5)
        assert same == (".mlp." in name), name
    assert kind.partition(",")[0] in report["weights"]
    assert "LoRA merged" in report["weights"]
    assert report["weights"] in (tmp_path / "out" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, min_new_tokens=2).shape == (1, 5)


def test_what_needs_plain_weights_is_refused(run, quantised, tmp_path):
    folder, _ = quantised("fp8")
    model = {"model": {"path": str(folder)}}
    with pytest.raises(UserError, match=r"quantised \(fp8\) and cannot be read in parts"):
        run(tmp_path / "out", model, {"transfer": {"block_mode": "streaming", "block_layers": 1}})
    with pytest.raises(UserError, match=r"quantised already \(fp8\)"):
        run(tmp_path / "out", {"model": model["model"] | {"load_in_4bit": True}})
    assert not (tmp_path / "out").exists()
    full = LinearizeConfig.from_dict({"adjust": {"method": "full"}})
    check_weights(full, False, Quantisation("fp8", stays=False))
    with pytest.raises(UserError, match=r"stay quantised \(gptq\)"):
        check_weights(full, False, Quantisation("gptq", stays=True))


def test_kinds_that_cannot_be_trained_over_are_refused_before_loading(quantised, monkeypatch):
    """Whatever transformers says of a kind; the weights do not have to exist."""
    folder, _ = quantised("fp8")
    (folder / "model.safetensors").unlink()
    checked = SimpleNamespace(validate_environment=lambda **settings: None, is_trainable=False)
    quantizers = "lolcats.modeling.quantised.AutoHfQuantizer.from_config"
    monkeypatch.setattr(quantizers, lambda *args, **settings: checked)
    described = json.loads((folder / "config.json").read_text())
    for method, message in (("eetq", r"\(eetq\), and .* neither train"), ("unknown", r"\(unknown\), which does not")):
        content = described | {"quantization_config": {"quant_method": method}}
        (folder / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            load_base_model(ModelSection(path=str(folder), device="cpu"))


class Packed(nn.Module):
    """A linear layer that has its weights as integers in a buffer, as kinds with their own kernels do."""

    differentiable = True

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.abs().max().item() / 127
        self.register_buffer("codes", (linear.weight / self.scale).round().to(torch.int8))
        self.register_buffer("bias", torch.full((linear.out_features,), 1e6))

    def forward(self, x):
        y = x @ (self.codes * self.scale).T
        y = y if self.bias is None else y + self.bias
        return y if self.differentiable else y.detach()


@pytest.fixture
def packed(model_dir):
    """A linearized model whose first layer's projections are `Packed`."""
    base, _ = load_base_model(ModelSection(path=str(model_dir), device="cpu"))
    attention = base.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, Packed(getattr(attention, name)))
    return convert(base, AttentionConfig(window_size=4))


def test_weights_of_an_unknown_kind_are_dequantised(packed):
    """From what the layers compute; large biases cost no digits."""
    assert len(adapted_projections(packed, AdjustSection())) == 8  # LoRA knows them as linear layers
    found = dict(dense_weights(packed))
    plain = {name: tensor for name, tensor in whole_weights(packed) if "layers.0.self_attn" not in name}
    assert all(found[name] is tensor or torch.equal(found[name], tensor) for name, tensor in plain.items())
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        path = f"model.model.layers.0.self_attn.{name}"
        layer = packed.get_submodule(path)
        assert torch.equal(found.pop(f"{path}.weight"), layer.codes * layer.scale)
        assert torch.equal(found.pop(f"{path}.bias"), layer.bias)
    assert not [name for name in found if "codes" in name]


def test_a_kernel_without_a_gradient_is_refused(packed, monkeypatch):
    refuse_without_gradient(packed)
    monkeypatch.setattr(Packed, "differentiable", False)
    with pytest.raises(UserError, match=r"Packed.* has no gradient"):
        refuse_without_gradient(packed)

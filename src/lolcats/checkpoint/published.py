"""Models that the paper's published code trained (github.com/HazyResearch/lolcats), as folders of this package.

A run there leaves YAML configurations and, of each stage, one file with the tensors that were trained:

    layers.I.self_attn.feature_map_q.mlp.layer   [H, D, P]      and feature_map_k, unless q and k share one
    layers.I.self_attn.feature_map_q.mlp.bias    [1, H, 1, 1]   with learned_kernel_kwargs.bias, one number a head
    layers.I.self_attn.window_factors            [1, H, 1, 1]   gamma before the sigmoid
    layers.I.self_attn.q_proj.lora_A.weight      [r, inputs]    and lora_B [outputs, r], of each target module

Names begin with the wrappers that the model had, and PEFT puts `.default` before `.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lolcats.checkpoint.write import export
from lolcats.config import AttentionConfig, ModelSection, read_yaml
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling.loading import load_base_model
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.provenance import provenance
from lolcats.report import card_head, public_name, without_paths

# Implementations of one function, of which the window alone counts here.
_ATTENTION_TYPE = re.compile(r"lolcats_(?:long_)?llama(?:_window_(?P<window>tk|sw)(?:_bf16|_fa2|_sdpa|_gen|_linear)?)?")
_FEATURE_MAPS = {"softmax_dim": "hedgehog", "relu": "t2r"}
_DEFAULTS = {
    "affine_attention_factors": False,
    "learned_kernel": "untied_head_einsum",
    "learned_kernel_kwargs.skip_connection": False,
    "feature_map_kwargs.fullspace": True,
    "num_feature_maps": 1,
    "rotary_config": None,
    "peft": None,
    "peft_config": None,
}
"""Settings of `attention` whose other values make another function, which this package does not have."""


def import_published(
    weights: Sequence[str], configurations: Sequence[Path], output: Path, *, base: str | None = None
) -> None:
    """Write a published model to `output`: base model, feature maps, window factors and merged LoRA.

    Args:
        weights: files (.pt, .safetensors), folders of them or hub repositories; of a tensor in several, the last
            counts. Pickles are read as tensors alone (`weights_only`).
        configurations: YAML or JSON: the model's (`model`, `attention`), and with LoRA that of stage 2 (`finetune`) or
            PEFT's adapter_config.json.
        output: a new or empty folder.
        base: hub id or folder of the base model; None: as the configuration says.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} is not an empty folder; choose another --output")
    settings = _settings(configurations)
    attention = _attention(settings)
    tensors = {name: tensor for source in weights for name, tensor in _tensors(source).items()}
    described = settings.get("model") or {}
    path = base or described.get("pretrained_model_name_or_path")
    section = ModelSection(path=path, device="cpu", dtype=described.get("torch_dtype") or "auto")
    original, tokenizer = load_base_model(section)
    model = convert(original, attention)
    finetune = settings.get("finetune")
    adapted: Any = None
    if finetune is not None:
        if finetune.get("method") != "lora" or not isinstance(finetune.get("kwargs"), dict):
            raise UserError(f"finetune.method={finetune.get('method')!r} cannot be imported: expected lora with kwargs")
        try:
            adapted = get_peft_model(model, LoraConfig(**finetune["kwargs"] | {"task_type": "CAUSAL_LM"}))
        except (TypeError, ValueError) as error:
            raise UserError(f"PEFT refuses the section `finetune`: {error}") from error
    _fill(model, tensors, settings["attention"])
    if adapted is not None:
        adapted.merge_and_unload()  # in place
    named = without_paths({"base_model": path, "weights": list(map(str, weights)), "configuration": settings})
    model.config.provenance = provenance() | {"imported": named["configuration"]}
    report = {
        "base_model": named.pop("base_model"),
        "imported": named,
        "provenance": provenance(),
        "perplexity": {},
        "stages": {},
        "exact_heads": model.config.exact_heads,
    }
    window = f"{attention.window} window of {attention.window_size}" if attention.window_size else "no window"
    card = f"""{card_head(str(path))}

A linear-time version of `{public_name(str(path))}` ([arXiv:2410.10254](https://arxiv.org/abs/2410.10254)), trained with
the paper's published code and imported by lolcats: {window}, feature map {attention.feature_map}. Its weights came from
{", ".join(map(public_name, weights))}; configurations and versions are in `lolcats_report.json`.
"""
    export(model, tokenizer, output, report=report, card=card)


def _settings(files: Sequence[Path]) -> dict[str, Any]:
    """The sections of all configurations; an adapter_config.json is one with `finetune` alone."""
    settings: dict[str, Any] = {}
    for file in files:
        content = read_yaml(file)
        if "peft_type" in content:
            content = {"finetune": {"method": "lora", "kwargs": content}}
        settings |= {name: content[name] for name in ("model", "attention", "finetune") if name in content}
    if not isinstance(settings.get("attention"), dict):
        raise UserError("no configuration has a section `attention`; give the model's with --config")
    return settings


def _attention(settings: dict[str, Any]) -> AttentionConfig:
    """The settings of this package that make the same function."""
    theirs = settings["attention"]

    def value(name: str, default: Any) -> Any:
        section, _, key = name.rpartition(".")
        found = ((theirs.get(section) or {}) if section else theirs).get(key)
        return default if found is None else found

    for name, expected in _DEFAULTS.items():
        if (found := value(name, expected)) != expected:
            raise UserError(f"attention.{name}={found!r} cannot be imported: expected {expected!r}")
    kind = _ATTENTION_TYPE.fullmatch(str(value("attention_type", "")))
    if kind is None:
        raise UserError(
            f"attention.attention_type={value('attention_type', None)!r} cannot be imported: expected lolcats_llama,"
            " lolcats_llama_window_tk or lolcats_llama_window_sw"
        )
    feature_map = _FEATURE_MAPS.get(value("feature_map", ""))
    if feature_map is None or (feature_map != "t2r" and value("learned_kernel_kwargs.bias", False)):
        raise UserError(
            f"attention.feature_map={value('feature_map', None)!r} cannot be imported: expected"
            f" {', '.join(_FEATURE_MAPS)}, with a bias of relu alone"
        )
    try:
        return AttentionConfig(
            window="sliding" if kind["window"] == "sw" else "terraced",
            window_size=value("window_size", 64) if kind["window"] else 0,
            feature_map=feature_map,  # type: ignore[arg-type]  # one of its names
            feature_dim=value("learned_kernel_kwargs.feature_dim", None),
            share_state="query_head",
            exact=tuple(value("softmax_attentions", ())),
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"the section `attention` cannot be imported: {error}") from error


def _tensors(source: str) -> dict[str, Tensor]:
    """The tensors of a file, folder or hub repository, by names without wrappers."""
    path = Path(source).expanduser()
    try:
        if not path.exists():
            path = Path(snapshot_download(source, allow_patterns=["*.pt", "*.safetensors"]))
        files = [path] if path.is_file() else sorted([*path.glob("*.pt"), *path.glob("*.safetensors")])
        if not files:
            raise UserError(f"{source} has no .pt or .safetensors file")
        read: dict[str, Any] = {}
        for file in files:
            pickled = file.suffix != ".safetensors"
            content = torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file)
            read |= content.get("model_state_dict", content)
    except (OSError, HfHubHTTPError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot read the weights {source}: {error}") from error
    except (UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise UserError(f"{source} holds something else than named tensors, which is not loaded: {error}") from error
    if others := [name for name, tensor in read.items() if not isinstance(tensor, Tensor)]:
        raise UserError(f"{source} holds something else than named tensors: {', '.join(map(str, others[:5]))}")
    return {_bare(name): tensor for name, tensor in read.items()}


def _bare(name: str) -> str:
    """A tensor's or module's name from its decoder layer on."""
    return re.sub(r"^.*?(?=layers\.\d+\.)", "", name).replace(".default.", ".")


@torch.no_grad()
def _fill(model: LolcatsForCausalLM, tensors: dict[str, Tensor], theirs: dict[str, Any]) -> None:
    """Copy the tensors into feature maps, window factors and adapters."""
    used = set()
    source_of_k = "q" if theirs.get("tie_qk_kernels") else "k"
    has_bias = (theirs.get("learned_kernel_kwargs") or {}).get("bias")

    def take(name: str, *shape: int) -> Tensor:
        if name not in tensors:
            raise UserError(
                f"the weights have no tensor {name}; they have {', '.join(sorted(tensors)[:5])}, ... Give the files of"
                " all stages, and the configurations that they were made with"
            )
        used.add(name)
        if tensors[name].shape != shape:
            raise UserError(f"the tensor {name} has shape {list(tensors[name].shape)}; expected {list(shape)}")
        return tensors[name]

    for layer in model.config.linear_layers:
        at = _bare(layer.module)
        maps: Any = model.model.get_submodule(layer.module).linear_attention
        for own, source in (("q", "q"), ("k", source_of_k)):
            weight = getattr(maps, f"{own}_weight")
            weight.copy_(take(f"{at}.feature_map_{source}.mlp.layer", *weight.shape))
            if has_bias:
                bias = take(f"{at}.feature_map_{source}.mlp.bias", 1, layer.num_heads, 1, 1)
                getattr(maps, f"{own}_bias").copy_(bias.view(-1, 1))
        if maps.config.window_size:
            maps.window_factor.copy_(take(f"{at}.window_factors", 1, layer.num_heads, 1, 1).flatten())
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            for part in ("lora_A", "lora_B"):
                weight = getattr(module, part)["default"].weight
                weight.copy_(take(f"{_bare(path)}.{part}.weight", *weight.shape))
    if unexpected := sorted(tensors.keys() - used):
        raise UserError(
            f"the configurations have no place for the tensors {', '.join(unexpected[:5])} ({len(unexpected)} in all)."
            " Those of LoRA need that of stage 2, with its section `finetune`"
        )

"""Loading the pretrained model that is to be linearized, with errors that say what to do."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

from lolcats.config import ModelSection
from lolcats.errors import UserError, first_line
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.text_tower import TEXT_NAMES, text_tower


@dataclass(frozen=True)
class Source:
    """What a section says to load; of the files, only the configuration is read.

    Attributes:
        path: folder or hub id.
        arguments: of `from_pretrained`: where the files are.
        whole: the checkpoint's configuration.
        config: the causal language model's; another one only if the checkpoint is multimodal.
    """

    path: str
    arguments: dict[str, Any]
    whole: PreTrainedConfig
    config: PreTrainedConfig


def locate(section: ModelSection, *, allow_linearized: bool = False) -> Source:
    """Find a causal language model; one that is linearized already is refused unless `allow_linearized`."""
    path = _resolve(section)
    arguments: dict[str, Any] = {"revision": section.revision, "trust_remote_code": False}
    config = _load_config(path, arguments)
    if isinstance(config, LolcatsConfig) and not allow_linearized:
        raise UserError(f"{path} is already linearized; start from the model it was made from")
    if config.is_encoder_decoder:
        raise UserError(
            f"{path} ({config.model_type}) is an encoder-decoder model; only decoders (causal language models) can be"
            " linearized"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise UserError(f"{path} ({config.model_type}) is not a decoder: it has no causal language model")
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        raise UserError(
            f"the weights of {path} are quantised ({quantised.get('quant_method', 'bitsandbytes')}): start from the"
            " original weights, or dequantise them once and give that folder, with the tokenizer's files. With"
            " transformers, where it knows how:\n"
            f'  AutoModelForCausalLM.from_pretrained("{path}").dequantize().save_pretrained("FOLDER")'
        )
    return Source(path, arguments, config, text_tower(config, path))


def load_base_model(section: ModelSection, *, allow_linearized: bool = False) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer as `section` says.

    Only safetensors are read, never pickles. The model is in eval mode. Of a multimodal model it is
    the language model alone, which is logged.
    """
    source = locate(section, allow_linearized=allow_linearized)
    path = source.path
    device = resolve_device(section.device)
    dtype = resolve_dtype(section.dtype, device)
    tokenizer = load_tokenizer(source)
    tower: dict[str, Any] = (
        {} if source.whole is source.config else {"key_mapping": TEXT_NAMES, "config": source.config}
    )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            **source.arguments,
            **tower,
            **_quantize(section, dtype),
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    except torch.OutOfMemoryError as error:
        raise UserError(f"{path} does not fit into the memory of {device}: {error}. Try device=cpu") from error
    except OSError as error:
        raise UserError(
            f"cannot load the weights of {path}: {error}\nOnly safetensors are read, because loading"
            " pickled weights can run code; convert older checkpoints with transformers' save_pretrained"
        ) from error
    except (ImportError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot load {path}: {error}") from error
    model, info = loaded
    if wrong := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):  # drawn at random
        raise UserError(
            f"{path} is incomplete: of the model's tensors {len(wrong)} are missing or have another shape:"
            f" {', '.join(wrong[:5])}. Download it again, or check that config.json belongs to the weights"
        )
    if not tower and (extra := sorted(info["unexpected_keys"])):
        warnings.warn(
            f"{path}: left out {len(extra)} tensors of no part of the model: {', '.join(extra[:5])}", stacklevel=2
        )
    if tower:
        model._weight_conversions = None  # a text model is saved under its own names
    if section.load_in_4bit:
        model.hf_quantizer.remove_quantization_config(model)  # the exported folder has plain weights
    return model.eval(), tokenizer


def load_skeleton(section: ModelSection) -> PreTrainedModel:
    """The model without its weights: parameters are on the meta device, buffers are real.

    Architecture, types and generation settings are those of `load_base_model`.
    """
    source = locate(section)
    path, config = source.path, source.config
    dtype = resolve_dtype(section.dtype, resolve_device(section.device))
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"cannot build {path}: {error}") from error
    with suppress(OSError):  # most checkpoints have one; else it follows from the configuration
        model.generation_config = GenerationConfig.from_pretrained(path, revision=section.revision or "main")
    return model.eval()


def _resolve(section: ModelSection) -> str:
    if section.path is None:
        raise UserError("no model given: pass a Hugging Face hub id or a local folder (model.path)")
    path = os.path.expanduser(section.path)
    if os.path.isfile(path):
        raise UserError(f"{path} is a file; pass a Hugging Face model folder")
    if not os.path.isdir(path):
        if path.startswith(".") or os.path.isabs(path) or path.count("/") > 1:
            raise UserError(f"model folder not found: {path}; pass one with config.json, or a hub id (OWNER/NAME)")
    elif not any((Path(path) / name).is_file() for name in ("config.json", ADAPTER_CONFIG_NAME)):
        hint = "; docs/models.md says how to make one of a GGUF file" if any(Path(path).glob("*.gguf")) else ""
        raise UserError(f"{path} has no config.json, so that it is not a Hugging Face model folder{hint}")
    return path


def resolve_device(name: str, gpus: str = "/dev/nvidia[0-9]*") -> torch.device:
    """The device of `model.device`; auto is a GPU that PyTorch can use, else the CPU.

    Args:
        gpus: pattern of the files by which Linux shows NVIDIA's GPUs.
    """
    build = f"PyTorch {torch.__version__}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0  # NVML counts those that cannot be used, too
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if name == "auto" and count == 0 and glob(gpus) and not hidden:
        raise UserError(
            f"this machine has an NVIDIA GPU that {build} cannot use: install the build for its driver (nvidia-smi"
            " names the newest CUDA version it takes) from https://pytorch.org/get-started/locally, or add --device cpu"
        )
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda":
            if (device.index or 0) < count:
                return device
            raise RuntimeError(f"{build} sees {count} CUDA devices")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the second: PyTorch is built without it
        message = f"model.device={name!r}: {first_line(error)}; expected auto, cpu, cuda, cuda:N or mps"
        raise UserError(message) from error
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _load_config(path: str, arguments: dict[str, Any]) -> PreTrainedConfig:
    try:
        if find_adapter_config_file(path, revision=arguments["revision"]) is not None:
            raise UserError(
                f"{path} has an adapter ({ADAPTER_CONFIG_NAME}), which would be lost. Merge it first: move its files"
                " (adapter_*) to a folder ADAPTER, copy the tokenizer to MERGED, and with BASE, the model it adapts:\n"
                '  model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "ADAPTER")\n'
                '  model.merge_and_unload().save_pretrained("MERGED")'
            )
        return AutoConfig.from_pretrained(path, **arguments)
    except OSError as error:
        if os.path.isdir(path):
            raise UserError(f"cannot read {path}: {first_line(error)}") from error
        if "gated" in str(error):
            raise UserError(
                f"{path} is given to those who accepted its licence: do so at https://huggingface.co/{path}, then log"
                " in with `hf auth login` or set HF_TOKEN"
            ) from error
        raise UserError(
            f"model {path!r} not found: neither a local folder with a config.json nor a repository that the Hugging"
            f" Face hub serves from here ({first_line(error)}). Check the spelling and the network, and, for private"
            " models, log in with `hf auth login`"
        ) from error
    except (KeyError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(f"{path} brings its own model code, which is not run: it cannot be linearized") from error
        raise UserError(
            f"transformers {transformers.__version__} does not know the architecture of {path}: {first_line(error)}"
        ) from error


def _quantize(section: ModelSection, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained`; 4 bits are NF4 with quantised scales, as in QLoRA (arXiv:2305.14314)."""
    if not section.load_in_4bit:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "model.load_in_4bit needs the bitsandbytes package: pip install 'lolcats[quant]', or set it to false"
        )
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **settings)}


def load_tokenizer(source: Source) -> Any:
    """The tokenizer, whose tokens all have rows of the embedding."""
    path = source.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **source.arguments)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{path} has no tokenizer that loads ({first_line(error)}): put the original's tokenizer.json and"
            " tokenizer_config.json beside the weights"
        ) from error
    if not tokenizer("a")["input_ids"]:  # transformers makes an empty one of tokenizer_config.json alone
        raise UserError(f"the tokenizer of {path} knows no words: its tokenizer.json is missing, or its vocabulary")
    # Special tokens that no text has may lie beyond the embedding: Gemma 3's <image_soft_token>.
    rows = getattr(source.config.get_text_config(), "vocab_size", None) or sys.maxsize
    written = f"{getattr(tokenizer, 'chat_template', None)}{tokenizer.bos_token}{tokenizer.eos_token}"
    added = getattr(tokenizer, "added_tokens_decoder", {})
    beyond = [
        token.content
        for place, token in added.items()
        if place >= rows and (not token.special or token.content in written)
    ]
    if beyond or tokenizer.vocab_size > rows:
        which = ", ".join(beyond[:5]) or f"{tokenizer.vocab_size} in all"
        raise UserError(
            f"the tokenizer of {path} has tokens beyond the {rows} rows of the model's embedding ({which}): take the"
            " model's own tokenizer, or save the model after model.resize_token_embeddings(len(tokenizer))"
        )
    return tokenizer

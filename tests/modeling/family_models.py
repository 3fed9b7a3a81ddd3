"""A tiny random model of every supported family, and ways to run it."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert

TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}  # float32, the same sums in another order
VOCABULARY = 96
SLIDING_WINDOW = 6

# Large initial weights, so that attention is far from uniform.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": SLIDING_WINDOW}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA_NET = LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# name -> (model_type, what differs from COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama3.1": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama3.2": ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi1.5": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gemma2": ("gemma2", MIXED | {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", MIXED | {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", MIXED),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "granite": ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", MIXED | {"head_dim": 8}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "llama_4_scaling_beta": 0.1}
            | {"original_max_position_embeddings": 32}
        },
    ),
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4-moe": (
        "glm4_moe",
        {"head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "exaone4": ("exaone4", MIXED),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "arcee": ("arcee", {}),
    "seed-oss": ("seed_oss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "ernie4.5": ("ernie4_5", {"head_dim": 8}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": ("minimax_m2", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "afmoe": ("afmoe", MIXED | EXPERTS | {"head_dim": 16, "num_dense_layers": 1, "num_shared_experts": 1}),
    "gemma4": (
        "gemma4_text",
        MIXED
        | {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "gemma4-shared-keys": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"sliding_window": SLIDING_WINDOW, "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY},
    ),
    "gpt-oss": ("gpt_oss", MIXED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "llama4_text",
        {"no_rope_layers": [1, 0], "attention_chunk_size": 64, "head_dim": 8, "intermediate_size_mlp": 48}
        | {"num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "mimo": (
        "mimo_v2_flash",
        MIXED
        | {"head_dim": 16, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    ),
    # layer 0 has no softmax attention and stays as it is
    "qwen3-next": ("qwen3_next", DELTA_NET | EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 16}),
    "qwen3.5": ("qwen3_5_text", DELTA_NET | {"head_dim": 16}),
    "qwen3.5-moe": ("qwen3_5_moe_text", DELTA_NET | EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 16}),
    "olmo-hybrid": ("olmo_hybrid", DELTA_NET | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "lfm2": ("lfm2", CONVOLUTION),
    "lfm2-moe": ("lfm2_moe", CONVOLUTION | EXPERTS | {"num_dense_layers": 1}),
    "granite4": (
        "granitemoehybrid",
        LINEAR
        | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
        | {"num_local_experts": 4, "shared_intermediate_size": 16, "attention_multiplier": 0.2},
    ),
}
# Unlike each other in what matters to attention; the others are tested by `make test-all`.
DIFFERENT = ("llama3", "qwen3", "mixtral", "phi3", "gemma2", "gemma3", "gpt-neox", "cohere2", "gemma4-shared-keys")
DIFFERENT += ("gpt-oss", "llama4", "mimo", "qwen3-next", "lfm2", "granite4")


def families(*without: str) -> list[Any]:
    """Names of all families, as parameters of a test."""
    names = [name for name in FAMILIES if name not in without]
    return [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.slow) for name in names]


# Layers that carry another state; keys of an earlier layer; a setting that transformers' configuration lacks; chunks.
NOT_SERVED_BY_VLLM = {"qwen3-next", "qwen3.5", "qwen3.5-moe", "olmo-hybrid", "lfm2", "lfm2-moe", "granite4"}
NOT_SERVED_BY_VLLM |= {"gemma4-shared-keys", "afmoe", "llama4", "mimo"}
# vLLM's own softmax model of these configurations answers otherwise than transformers' (0.32), or does not start.
NOT_SERVED_BY_VLLM |= {"cohere2", "ministral3", "apertus", "minimax-m2"}

IMAGE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE |= {"image_size": 16, "patch_size": 8}
QWEN_IMAGE: dict[str, Any] = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 1}
QWEN_IMAGE |= {"intermediate_size": 24, "deepstack_visual_indexes": [0]}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
# name -> (model_type, of the text, of the images)
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", FAMILIES["gemma3"][1], IMAGE),
    "gemma4": (
        "gemma4",
        FAMILIES["gemma4"][1] | {"use_bidirectional_attention": "vision"},
        IMAGE | {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "position_embedding_size": 64},
    ),
    "mistral3": ("mistral3", {"model_type": "ministral3"}, IMAGE | {"model_type": "pixtral", "head_dim": 8}),
    "qwen2-vl": ("qwen2_vl", MROPE, QWEN_IMAGE | {"hidden_size": 32, "mlp_ratio": 1}),
    "qwen2.5-vl": ("qwen2_5_vl", MROPE, QWEN_IMAGE | {"hidden_size": 16, "out_hidden_size": 32}),
    "qwen3-vl": ("qwen3_vl", MROPE | {"head_dim": 8}, QWEN_IMAGE | {"hidden_size": 16, "out_hidden_size": 32}),
    "qwen3.5": ("qwen3_5", FAMILIES["qwen3.5"][1], QWEN_IMAGE | {"hidden_size": 16, "out_hidden_size": 32}),
    "llama4": (
        "llama4",
        FAMILIES["llama4"][1],
        IMAGE
        | {"image_size": 32, "intermediate_size": 64}
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 24),
    ),
    "llava": ("llava", {"model_type": "llama"}, IMAGE | {"model_type": "clip_vision_model"}),
    "smolvlm": ("smolvlm", {"model_type": "llama"}, IMAGE),
}


def build_multimodal(family: str) -> PreTrainedModel:
    """The family's original model for texts and images with eager attention, the same weights every time."""
    model_type, text, image = MULTIMODAL[family]
    config = AutoConfig.for_model(
        model_type,
        text_config=COMMON | text,
        vision_config=image,
        **dict.fromkeys(("image_token_id", "image_token_index"), 1),
        **({"mm_tokens_per_image": 4} if model_type == "gemma3" else {}),
    )
    return _random(AutoModelForMultimodalLM, config)


def build(family: str, **changes: Any) -> PreTrainedModel:
    """The family's original model with eager attention, the same weights every time."""
    model_type, difference = FAMILIES[family]
    return _random(AutoModelForCausalLM, AutoConfig.for_model(model_type, **(COMMON | difference | changes)))


def _random(auto: Any, config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(1)
    # grouped products of experts do not take float64, in which some tests compare
    model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases and norms that start at 0 or 1 would hide mistakes
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def linearized(original: PreTrainedModel, **attention: Any) -> Any:
    """A converted copy with feature maps away from their regular start."""
    model = convert(copy.deepcopy(original), AttentionConfig(**attention))
    torch.manual_seed(2)
    return randomised(model)


def randomised(model: Any, scale: float = 0.3) -> Any:
    """The linearized model, of which each linear parameter is moved."""
    for _, module in model.linear_layers():
        for parameter in module.parameters():
            parameter.data += scale * torch.randn_like(parameter)
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def padding(lengths: list[int], total: int, side: str = "left") -> torch.Tensor:
    """[B, total] attention mask of sequences of the given lengths."""
    position = torch.arange(total)
    rows = [position >= total - n if side == "left" else position < n for n in lengths]
    return torch.stack(rows).long()


@torch.no_grad()
def in_pieces(model: Any, input_ids: torch.Tensor, sizes: list[int], mask: torch.Tensor | None = None) -> Any:
    """Logits [B, T, V] from feeding pieces of the given sizes through one cache, and the cache."""
    cache = DynamicCache(config=model.config.get_text_config())
    logits, begin = [], 0
    for size in sizes:
        end = begin + size
        piece: dict[str, Any] = {"input_ids": input_ids[:, begin:end], "past_key_values": cache}
        if mask is not None:
            piece["attention_mask"] = mask[:, :end]
            piece["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, begin:end]
        logits.append(model(**piece, use_cache=True).logits)
        begin = end
    assert begin == input_ids.shape[1]
    return torch.cat(logits, dim=1), cache

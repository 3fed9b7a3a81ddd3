"""The language model inside a multimodal one, as a model of its own."""

from __future__ import annotations

import copy
import logging

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from lolcats.errors import UserError

logger = logging.getLogger(__name__)

TEXT_NAMES = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""Names of weights in the files of multimodal models -> in their language model alone, as transformers' key_mapping."""

# Language models without a class of their own that are, for text, models of another type. Their rotary embedding takes
# a position for each of time, height and width, which in text are one.
_SAME_IN_TEXT = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_ONLY_WITH_IMAGES = ("mrope_section", "mrope_interleaved")


def text_tower(config: PreTrainedConfig, path: str) -> PreTrainedConfig:
    """The configuration of the language model in a multimodal model; of any other model, its own."""
    text = config.get_text_config(decoder=True) if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else config
    if text is config:
        return config
    text = copy.deepcopy(text)
    if (plain := _SAME_IN_TEXT.get(text.model_type)) is not None:
        values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
        rope = {key: value for key, value in values["rope_parameters"].items() if key not in _ONLY_WITH_IMAGES}
        text = AutoConfig.for_model(plain, **values | {"rope_parameters": rope})
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{path} ({config.model_type}) is multimodal, and transformers has no class for its language model"
            f" ({text.model_type}) alone"
        )
    logger.warning("%s (%s): its language model alone (%s)", path, config.model_type, text.model_type)
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)  # the head is outside
    return text

"""The configuration saved with a linearized model."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from lolcats.ops import HybridSpec

# Read-only views of the base model's configuration, for tools that look at the top level only.
_FROM_TEXT_CONFIG = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
        "vocab_size",
    }
)


class LolcatsConfig(PreTrainedConfig):
    """A base model's configuration and what its attention was replaced by.

    Attributes:
        text_config: the base model's own configuration.
        window, window_size, window_blocks, sinks, sparse_cache, cache_by, decay, normalizer, linear_length_cap,
            feature_map, feature_dim, feature_init, feature_scale, share_state, window_gamma: as
            `lolcats.config.AttentionSection`.
        linear_layers: one entry per linearized layer: index, module (its path in the base model), num_heads,
            num_kv_heads, head_dim.
        softmax_layers: indices of the layers that keep softmax attention.
        provenance: how the weights were made; free-form, JSON values.
    """

    model_type = "lolcats"
    sub_configs = {"text_config": AutoConfig}  # type: ignore[dict-item]  # whatever the base model has
    has_no_defaults_at_init = True

    text_config: Any = None
    window: str = "terraced"
    window_size: int = 64
    window_blocks: int = 2
    sinks: int = 0
    sparse_cache: int = 0
    cache_by: str = "recall"
    decay: bool = False
    normalizer: str = "sum"
    linear_length_cap: int = 0
    feature_map: str | None = "hedgehog"
    feature_dim: int | None = None
    feature_init: str = "identity"
    feature_scale: float = 1.0
    share_state: str = "kv_head"
    window_gamma: float = 0.1
    linear_layers: Any = None
    softmax_layers: Any = None
    provenance: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            values = dict(self.text_config)
            self.text_config = AutoConfig.for_model(values.pop("model_type"), **values)
        self.linear_layers = list(self.linear_layers or [])
        self.softmax_layers = list(self.softmax_layers or [])
        self.provenance = dict(self.provenance or {})
        super().__post_init__(**kwargs)

    def spec(self) -> HybridSpec:
        """The operator's description.

        Raises:
            ValueError: values that exclude each other or an unknown feature map.
        """
        return HybridSpec(
            window=self.window,  # type: ignore[arg-type]  # checked by HybridSpec
            window_size=self.window_size,
            blocks=self.window_blocks,
            sinks=self.sinks,
            sparse_cache=self.sparse_cache,
            cache_by=self.cache_by,  # type: ignore[arg-type]  # checked by HybridSpec
            decay=self.decay,
            normalizer=self.normalizer,  # type: ignore[arg-type]  # checked by HybridSpec
            feature_map=self.feature_map,
            linear_length_cap=self.linear_length_cap,
        )

    def __getattr__(self, name: str) -> Any:
        text_config = self.__dict__.get("text_config")
        if name in _FROM_TEXT_CONFIG and text_config is not None:
            return getattr(text_config, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

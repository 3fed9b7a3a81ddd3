"""The configuration saved with a linearized model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import transformers

from lolcats.config.attention import AttentionConfig, LayerHeads
from lolcats.modeling.remote_code import AUTO_MAP

TESTED = "5.17", "5.25"
"""From which release of transformers on this was tested, and before which; as in pyproject.toml."""


def check_transformers(release: str) -> None:
    """Log a warning if `release` of transformers is newer than what was tested.

    Raises:
        ImportError: it is older.
    """
    first, end = TESTED
    message = f"lolcats models were tested with transformers>={first},<{end}, but {release} is installed"

    def number(text: str) -> list[int]:
        return [int(part) for part in text.split(".")[:2]]

    if number(release) < number(first):
        raise ImportError(f'{message}: pip install "transformers>={first},<{end}"')
    if number(release) >= number(end):
        remedy = f'if something fails, pip install "transformers>={first},<{end}"'
        transformers.utils.logging.get_logger(__name__).warning(f"{message}; {remedy}")


check_transformers(transformers.__version__)  # before anything that another release may lack

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


class LolcatsConfig(transformers.PreTrainedConfig):
    """A base model's configuration and what its attention was replaced by.

    Attributes:
        text_config: the base model's own configuration.
        attention: the attention settings, an `AttentionConfig` (a mapping is read as one).
        layer_heads: a `LayerHeads` (or a mapping) for each attention layer, in their order.
        provenance: how the weights were made; free-form, JSON values.

    Raises:
        ValueError: as `AttentionConfig` and `LayerHeads`.
    """

    model_type = "lolcats"
    sub_configs = {"text_config": transformers.AutoConfig}  # type: ignore[dict-item, unused-ignore]  # whatever the base model has
    has_no_defaults_at_init = True

    text_config: Any = None
    attention: Any = None
    layer_heads: Any = None
    provenance: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            values = dict(self.text_config)
            self.text_config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        if self.attention is None:
            self.attention = AttentionConfig()
        self.layer_heads = [
            layer if isinstance(layer, LayerHeads) else LayerHeads(**layer) for layer in self.layer_heads or []
        ]
        self.provenance = dict(self.provenance or {})
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """A mapping assigned to `attention` (overrides of from_pretrained and of vLLM) changes these settings alone."""
        if name == "attention" and isinstance(value, dict):
            saved = self.__dict__.get("attention")
            if saved is not None and {*map(str, value.get("exact", saved.exact))} != {*map(str, saved.exact)}:
                raise ValueError(f"attention.exact={value['exact']}: layer_heads say which; see model.set_exact")
            value = replace(saved, **value) if isinstance(saved, AttentionConfig) else AttentionConfig(**value)
        super().__setattr__(name, value)

    @property
    def linear_layers(self) -> list[LayerHeads]:
        """The layers with linear heads."""
        return [layer for layer in self.layer_heads if not layer.is_softmax]

    @property
    def exact_heads(self) -> list[str]:
        """The heads that keep softmax attention, written as in `AttentionConfig.exact`."""
        layers = [layer for layer in self.layer_heads if layer.exact]
        return [
            name
            for layer in layers
            for name in ([str(layer.index)] if layer.is_softmax else [f"{layer.index}.{head}" for head in layer.exact])
        ]

    @property
    def has_exact_heads(self) -> bool:
        """Whether any head keeps softmax attention, so that a cache grows with the sequence."""
        return any(layer.exact for layer in self.layer_heads)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: the model's save_pretrained writes the code, with that of the configuration."""

    def to_dict(self) -> dict[str, Any]:
        """As any configuration's; settings and layers as plain values, and where the model's code is."""
        plain = {"attention": asdict(self.attention), "layer_heads": [asdict(layer) for layer in self.layer_heads]}
        return super().to_dict() | plain | {"auto_map": AUTO_MAP}

    def __getattr__(self, name: str) -> Any:
        text_config = self.__dict__.get("text_config")
        if name in _FROM_TEXT_CONFIG and text_config is not None:
            with suppress(RuntimeError):  # layers differ in it (Gemma 4), and transformers does not choose
                return getattr(text_config, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

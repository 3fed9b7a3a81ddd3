"""From a pretrained model to one whose attention layers can be linear.

Nothing here knows families of models: a forward pass of two tokens shows which layers reach transformers'
attention interface, and with what. A model in which a layer with keys and values does not is refused, because that
layer would silently keep softmax attention. Layers of another kind (`recurrent_layers`) stay as they are.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedModel

from lolcats.config import DataSection, LinearizeConfig, ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.modeling.attention import ATTENTION_NAME
from lolcats.modeling.cache import longrope_border, recurrent_layers
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.loading import Source, load_skeleton
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.probing import AttentionLayer, probe

AUTO_OFFSET = 7  # sequences' worth of positions
CHUNKED = "chunked_attention"  # transformers' name for layers whose queries see the keys of their own chunk


def convert(base_model: PreTrainedModel, attention: AttentionConfig) -> LolcatsForCausalLM:
    """Wrap `base_model`, which is changed in place, with linear attention in its layers.

    Feature maps and window factors get their initial values; all other weights are the base model's own.

    Raises:
        UserError: the model cannot be linearized (it says why), or `attention` does not fit it.
    """
    return _wrap(base_model, linearized_config(base_model, attention))


def keep_softmax(base_model: PreTrainedModel) -> LolcatsForCausalLM:
    """Wrap `base_model`, which is changed in place, with its softmax attention in all heads: what the engine runs of an
    original model. Nothing that it computes changes.
    """
    _check_model(base_model)
    layers = _attention_layers(base_model)
    attention = AttentionConfig(exact=tuple(layer.heads.index for layer in layers))
    return _wrap(base_model, _config_of(base_model, attention, layers, *_exact_heads(layers, attention, base_model)))


def _wrap(base_model: PreTrainedModel, config: LolcatsConfig) -> LolcatsForCausalLM:
    model = LolcatsForCausalLM(config, base_model)
    if base_model.generation_config is not None:
        model.generation_config = base_model.generation_config
    return model.train(base_model.training)


def check_architecture(section: ModelSection, attention: AttentionConfig, data: DataSection) -> LolcatsConfig | None:
    """Refuse, before weights are read, a model that cannot be linearized or that `attention` or `data` does not fit.

    It is built without weights. What cannot run so, because it looks at values, is judged when it has its weights.

    Returns:
        The linearized model's configuration; None: judged later.
    """
    skeleton = load_skeleton(section)
    try:
        linearized = linearized_config(skeleton, attention)
    except UserError as error:
        if error.__cause__ is None:  # else its forward pass failed
            raise
        return None
    fit_positions(data, skeleton)
    return linearized


def linearized_config(base_model: PreTrainedModel, attention: AttentionConfig) -> LolcatsConfig:
    """The configuration of `base_model` with linear attention; the model is only looked at."""
    _check_model(base_model)
    layers = _attention_layers(base_model)
    exact, sliding = _exact_heads(layers, attention, base_model)
    config = _config_of(base_model, attention, layers, exact, sliding)
    if not config.linear_layers:
        raise UserError(
            f"no head of {_name(base_model)} is left to linearize: all keep softmax attention"
            f" (exact={','.join(map(str, attention.exact))}, sliding_layers={attention.sliding_layers})"
        )
    for heads in config.linear_layers if attention.feature_map is not None else ():
        if attention.feature_dim is not None and attention.feature_dim > heads.head_dim:
            raise UserError(
                f"feature_dim={attention.feature_dim} is larger than head_dim={heads.head_dim} of layer {heads.index}:"
                " feature maps start as a truncated identity; choose a smaller feature_dim"
            )
    return config


def _config_of(
    base_model: PreTrainedModel,
    attention: AttentionConfig,
    layers: list[AttentionLayer],
    exact: dict[int, tuple[int, ...]],
    sliding: Literal["keep", "linearize"],
) -> LolcatsConfig:
    return LolcatsConfig(  # without a name: trainers that load a model of their own by it would take the base model
        text_config=copy.deepcopy(base_model.config),  # the new configuration changes its attention
        attention=replace(attention, sliding_layers=sliding),
        layer_heads=[replace(heads, exact=exact[heads.index]) for heads, *_ in layers],
        dtype=base_model.dtype,
    )


def positions_of(base: PreTrainedModel | Source) -> int:
    """How many positions the model was trained for."""
    return getattr(base.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def fit_positions(data: DataSection, base: PreTrainedModel) -> DataSection:
    """`data` with numbers for `position_offset` and `position_jumps`, which may be "auto".

    Raises UserError if training sequences reach beyond the model's positions or what one of its layers knows.
    """
    config = base.config.get_text_config()
    length, offset, jumps = data.sequence_length, data.position_offset, data.position_jumps
    positions = positions_of(base)
    room = positions - length
    if room < 0:
        raise UserError(
            f"data.sequence_length={length} is longer than the {positions} positions that the model was"
            f" trained for; choose at most {positions}"
        )
    if (chunk := getattr(config, "attention_chunk_size", None)) and length > chunk:
        raise UserError(
            f"data.sequence_length={length} is longer than the chunks of {chunk} tokens that some layers of"
            f" {_name(base)} attend within; choose at most {chunk}"
        )
    # With longrope, one position beyond the border changes the factors of the whole micro-batch.
    border = longrope_border(config) or positions
    room = border - length if length <= border else room
    if offset == "auto":
        offset = min(AUTO_OFFSET * length, room)
    elif offset > room:
        known = "was trained for" if border == positions else "rotates by the same factors (longrope)"
        raise UserError(
            f"data.position_offset={offset} and sequences of {length} tokens reach beyond the {border} positions"
            f" that the model {known}; choose at most {room}"
        )
    if jumps == "auto":
        jumps = 0 if offset == 0 or _has_sliding_layers(config) else 1
    elif jumps and _has_sliding_layers(config):
        raise UserError(
            f"data.position_jumps={jumps} makes distances that layers with a sliding window have never seen:"
            " set data.position_jumps=0"
        )
    return data.model_copy(update={"position_offset": offset, "position_jumps": jumps})


def stage_section(config: LinearizeConfig, stage: str, base: PreTrainedModel) -> DataSection:
    """What a stage trains on, fitted to the model; sequences of its own data are as long as positions allow."""
    data = config.data_of(stage)
    if getattr(config, stage).data is not None:
        length = min(data.sequence_length, max(positions_of(base), config.data.sequence_length))
        data = data.model_copy(update={"sequence_length": length})
    return fit_positions(data, base)


def covered_positions(stages: Mapping[str, DataSection], base: PreTrainedModel) -> str:
    """A sentence on the positions that stages train, whose data `fit_positions` has fitted, beside the model's own."""
    covered = {stage: data.sequence_length + int(data.position_offset) for stage, data in stages.items()}
    sentence = "positions trained: " + ", ".join(f"{stage} up to {last}" for stage, last in covered.items())
    positions = positions_of(base)
    if positions == sys.maxsize:
        return f"{sentence}; the model names no limit"
    sentence += f", of the model's {positions}"
    if border := longrope_border(base.config):
        sentence += f" (longrope: {border} with the same factors, which no position is moved across)"
    if max(covered.values(), default=positions) >= positions:
        return sentence
    return f"{sentence}; what lies beyond is left to how it generalises (--sequence-length, data.position_offset)"


def _has_sliding_layers(config: Any) -> bool:
    """Whether some layers see fewer tokens than the model has positions."""
    if kinds := getattr(config, "layer_types", None):
        return any("sliding" in kind or kind == CHUNKED for kind in kinds)
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def _refuse(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(f"{_name(model)} cannot be linearized: {reason}")


def _check_model(model: PreTrainedModel) -> None:
    config = model.config
    own_code = type(model).__module__.startswith("transformers_modules")
    causal_lm = model.can_generate() and model.get_output_embeddings() is not None
    both_ways = getattr(config, "is_causal", True) is False
    both_ways |= getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")  # Gemma 4: images
    for is_so, reason in (
        (config.get_text_config()._attn_implementation == ATTENTION_NAME, "it is linearized already"),
        (config.is_encoder_decoder, "it is an encoder-decoder model; only decoders can be"),
        (own_code, "its code comes with the checkpoint, so that an exported folder could not load it"),
        (
            config.get_text_config(decoder=True) is not config,
            "it is made of several models (multimodal); load its language model alone (load_base_model)",
        ),
        (not causal_lm, "it is not a causal language model (no language-model head)"),
        (both_ways, "it attends in both directions"),
    ):
        if is_so:
            raise _refuse(model, reason)


def _attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """All attention layers; refuses what could not be linearized or cached."""
    expected, recurrent = model.config.num_hidden_layers, recurrent_layers(model.config)
    # beside recurrent layers, which know the order of tokens, attention may have no positions at all
    if not recurrent and not any("rotary" in type(module).__name__.lower() for module in model.modules()):
        raise _refuse(model, "it has no rotary position embedding (RoPE)")
    try:
        layers = probe(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise _refuse(model, f"a forward pass of two tokens failed ({type(error).__name__}: {error})") from error
    indices = [layer.heads.index for layer in layers]
    missing = sorted(set(range(expected)) - set(indices) - set(recurrent))
    if missing:
        which = "its layers" if len(missing) == expected else f"its layers {missing}"
        raise _refuse(
            model,
            f"{which} do not route attention through transformers' AttentionInterface, so they would silently keep"
            " the attention they have",
        )
    if not layers:
        raise _refuse(model, "it has no softmax attention")
    for layer in layers:
        if layer.obstacle is not None:
            raise _refuse(model, f"layer {layer.heads.index} {layer.obstacle}")
    if len(set(indices)) != len(layers):
        raise _refuse(model, "some layers have several attention modules")
    return layers


def _exact_heads(
    layers: list[AttentionLayer], attention: AttentionConfig, model: PreTrainedModel
) -> tuple[dict[int, tuple[int, ...]], Literal["keep", "linearize"]]:
    """KV heads of each layer that keep softmax attention, and what `sliding_layers` is for this model.

    Those of chunked layers (Llama 4) always do: linear attention would see the tokens before the chunk.
    """
    name, kinds = _name(model), getattr(model.config, "layer_types", None) or {}
    heads = {own.index: own.num_kv_heads for own, *_ in layers}
    named = () if attention.exact_budget else tuple(map(str, attention.exact))  # a budget is spent later
    exact = named_heads(named, heads, name)
    sliding = {layer.heads.index for layer in layers if layer.sliding_window is not None}
    choice = attention.sliding_layers
    if choice == "auto":
        choice = "keep" if sliding and sliding != set(heads) else "linearize"
    kept = sliding if choice == "keep" else set()
    kept |= {index for index in heads if kinds and kinds[index] == CHUNKED}
    exact |= {index: set(range(heads[index])) for index in kept}
    return {index: tuple(sorted(found)) for index, found in exact.items()}, choice


def named_heads(names: Iterable[str], num_kv_heads: Mapping[int, int], model: str) -> dict[int, set[int]]:
    """The heads of each layer that are named as in `AttentionConfig.exact`: 7.2, 7, 0-7."""
    found: dict[int, set[int]] = {index: set() for index in num_kv_heads}
    for name in names:
        layer, _, head = name.partition(".")
        first, _, last = layer.partition("-")
        layers = range(int(first), int(last or first) + 1)
        if not layers:
            raise UserError(f"exact={name}: expected the first layer before the last, as in {last}-{first}")
        if not num_kv_heads.keys() >= set(layers):
            most = max(num_kv_heads)
            known = f"0 to {most}" if len(num_kv_heads) > most else ", ".join(map(str, num_kv_heads))
            raise UserError(f"exact={name}: {model} has attention in the layers {known}")
        if head and int(head) >= num_kv_heads[layers[0]]:
            raise UserError(
                f"exact={name}: layer {layer} of {model} has the KV heads 0 to {num_kv_heads[layers[0]] - 1}"
            )
        for index in layers:
            found[index] |= {int(head)} if head else set(range(num_kv_heads[index]))
    return found

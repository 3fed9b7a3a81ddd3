"""The attention settings, each defined once, and which heads of a model's layers they apply to.

Recipes, saved models, command-line flags, the operator and its kernels all use `AttentionConfig`; a setting's name,
type, default, range and meaning are written nowhere else. Only the standard library is imported here, so that the
file can travel with an exported model.

The function that the settings describe: for a query at position n (counted from the start of its sequence) the keys
j <= n fall into two parts,

    softmax part   window_start(n) <= j, or j < sinks
    linear part    sinks <= j < window_start(n)

and with W = softmax part, O = linear part, c_n = max over W of the scores s_nj = q_n . k_j * scale

    y_n = ( gamma * sum_W exp(s_nj - c_n) v_j + phi_q(q_n) . sum_O phi_k(k_j) v_j^T )
        / ( gamma * sum_W exp(s_nj - c_n)     + phi_q(q_n) . sum_O phi_k(k_j)       )

(arXiv:2410.10254, equation hybrid_linear_swa). c_n scales only the window's terms, so it belongs to the function and
to its gradient. With a linear length cap h the terms of O are multiplied by min(1, h / (n + 1)): the sum over ever more
keys weighs no more than it would at h tokens. Implementations multiply gamma by max(1, (n + 1) / h) instead, which is
the same quotient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import ge, gt, lt
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

_LIMITS = {"ge": (ge, "at least"), "gt": (gt, "more than"), "lt": (lt, "less than")}


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A field with its meaning in `metadata["help"]` and, if given, limits and marks beside it.

    Args:
        limits: `ge`, `gt`, `lt`, limits of a number; `auto`, what the value "auto" of a recipe becomes (a whole
            configuration resolves it before an `AttentionConfig` is made); `adjustable=True`, the setting can be
            changed on a trained model, without training it again.
    """
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class AttentionConfig:
    """What replaces softmax attention; hashable. The fields carry their meaning as help texts.

    Raises:
        ValueError: a value of the wrong type or out of range, or values that exclude each other.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    window: Literal["terraced", "sliding"] = setting(
        "terraced",
        "terraced: the query's block of window_size tokens and the blocks before it, counted from the sequence start;"
        " sliding: the last window_size tokens, the query's own included.",
    )
    window_size: int = setting(
        64, "Tokens in the sliding window, or in one block of the terraced window; 0: no window.", ge=0
    )
    window_blocks: int = setting(
        2, "Terraced: softmax over the current and the previous window_blocks - 1 blocks.", ge=1
    )
    sinks: int = setting(0, "The first tokens of a sequence that stay in the softmax part of every query.", ge=0)
    feature_map: Literal["hedgehog", "t2r"] | None = setting(
        "hedgehog", "Map of queries and keys in the linear part; null: no linear part (window attention alone)."
    )
    feature_dim: int | None = setting(
        None, "Columns of the feature map's weight; null: so that there are head_dim features.", ge=1
    )
    share_state: Literal["kv_head", "query_head"] = setting(
        "kv_head", "One key feature map and state per KV head, or per query head (the paper's models)."
    )
    window_gamma: float = setting(0.1, "Initial gamma of every head, the factor of the window's terms.", gt=0.0, lt=1.0)
    linear_length_cap: int = setting(
        0,
        "Tokens from which on the linear part weighs no more than it would at that many, for texts longer than those"
        " of training; 0: never.",
        ge=0,
        auto="data.sequence_length, and 0 where softmax or the linear part is alone",
        adjustable=True,
    )
    exact: tuple[int | str, ...] = setting(
        (),
        "KV heads that keep softmax attention over all keys and a growing cache: `7.2`, head 2 of layer 7, both counted"
        " from 0; `7`, all heads of layer 7; `0-7`, all heads of these layers. Or how many, chosen by"
        " gates: `12%` of them; `24MiB@8192`, as many as keep a sequence's cache of 8192 tokens within 24 MiB.",
    )
    exact_window: int | str | None = setting(
        None,
        "Tokens that exact heads look back at, their own included, beside the first `sinks` of the sequence; or what a"
        " sequence may keep in all, 16MiB, from which as many tokens follow; null: all tokens. Layers with a native"
        " window keep to that.",
        adjustable=True,
    )
    cache_bits: int | None = setting(
        None,
        "8: exact heads and the windows of linear ones keep keys and values in 8 bits, with a factor for each token and"
        " head; null: in the model's type, as layers with a native window always do.",
        adjustable=True,
    )
    sliding_layers: Literal["auto", "keep", "linearize"] = setting(
        "auto",
        "Layers with a native sliding window, which already need constant memory. keep: leave them; linearize: replace"
        " them like the others; auto: keep them in models that mix both kinds (conversion decides, and saves which).",
    )

    def __post_init__(self) -> None:
        for name, value in _plain_values(self).items():
            object.__setattr__(self, name, value)
        if self.window_size == 0 and self.feature_map is None:
            raise ValueError("window_size=0 without a feature_map leaves nothing to attend to; set one of them")
        if self.linear_length_cap > 0 and not self.has_both_parts:
            raise ValueError(
                "linear_length_cap weighs the linear part against the softmax part and needs both: a feature_map,"
                f" and a window or sinks; got feature_map={self.feature_map!r}, window_size={self.window_size} and"
                f" sinks={self.sinks}"
            )
        window = self.exact_window
        if isinstance(window, str) and re.fullmatch(r"\d+(\.\d+)?[KMG]iB", window) is None:
            raise ValueError(f"exact_window={window!r}: expected tokens, or bytes as in 16MiB")
        if isinstance(window, int) and window < max(self.window_size, 1):
            raise ValueError(f"exact_window={window}: expected at least window_size={max(self.window_size, 1)} tokens")
        if self.cache_bits not in (None, 8):
            raise ValueError(f"cache_bits={self.cache_bits}: expected 8, or null for the model's type")
        if self.exact_budget is None:
            for heads in self.exact:
                if re.fullmatch(r"\d+([.-]\d+)?", str(heads)) is None:
                    raise ValueError(
                        f"exact={heads!r}: expected a KV head (7.2), a layer (7) or several (0-7); or a budget alone,"
                        " 12% or 24MiB@8192"
                    )

    @property
    def exact_budget(self) -> str | None:
        """How many heads are to be exact (12% or 24MiB@8192), if gates are to choose them."""
        budget = str(self.exact[0]) if len(self.exact) == 1 else ""
        return budget if re.fullmatch(r"\d+(\.\d+)?(%|[KMG]iB@\d+)", budget) else None

    @property
    def exact_tokens(self) -> int | None:
        """`exact_window` in tokens; None: all, which bytes are until it is known which heads are exact."""
        return self.exact_window if isinstance(self.exact_window, int) else None

    @property
    def has_softmax(self) -> bool:
        """Whether any key can be in the softmax part."""
        return self.window_size > 0 or self.sinks > 0

    @property
    def has_both_parts(self) -> bool:
        """Whether there is a linear part beside the softmax part."""
        return self.has_softmax and self.feature_map is not None

    @property
    def reach(self) -> int:
        """Distance d by which keys enter the linear part late: a key is in the linear part of a query
        only if it is at least d (sliding) or d / window_size whole blocks (terraced) older."""
        return self.window_size * (self.window_blocks - 1 if self.window == "terraced" else 1)

    @property
    def capacity(self) -> int:
        """Slots of the state's ring of keys and values: the most tokens a window can hold."""
        return self.window_size * (self.window_blocks if self.window == "terraced" else 1)

    def window_start(self, position: Any) -> Any:
        """First key position in the window of a query at `position` (an int, or an int tensor of any shape); >= 0."""
        if self.window == "sliding" or self.window_size == 0:
            start = position - self.window_size + 1
        else:
            start = (position // self.window_size - self.window_blocks + 1) * self.window_size
        return max(start, 0) if isinstance(start, int) else start.clamp_min(0)

    def gamma_at(self, gamma: Any, position: Any) -> Any:
        """`gamma` of queries at `position` (int tensor that broadcasts with it), with the length cap's factor."""
        if self.linear_length_cap == 0:
            return gamma
        return gamma * ((position + 1).to(gamma.dtype) / self.linear_length_cap).clamp_min(1.0)

    def within(self, tokens: int) -> AttentionConfig:
        """The same function for whole sequences of up to `tokens` tokens: no length cap that none of them passes."""
        return replaced(self, linear_length_cap=0) if 0 < self.linear_length_cap >= tokens else self


replaced = cache(replace)  # checking a configuration takes longer than a small layer


@dataclass(frozen=True, kw_only=True)
class LayerHeads:
    """One attention layer of a model, and which of its heads keep softmax attention over all keys.

    Attributes:
        index: of the layer, from 0.
        module: path of its attention module in the base model.
        num_heads, num_kv_heads, head_dim: shape.
        exact: KV heads that keep softmax attention, ascending; with all of them it is a softmax layer.

    Raises:
        ValueError: heads that the layer does not have.
    """

    index: int
    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    exact: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", tuple(sorted(set(self.exact))))  # JSON has lists
        if self.exact and not 0 <= self.exact[0] <= self.exact[-1] < self.num_kv_heads:
            raise ValueError(f"layer {self.index} has the KV heads 0 to {self.num_kv_heads - 1}; got {self.exact}")

    @property
    def is_softmax(self) -> bool:
        return len(self.exact) == self.num_kv_heads


def _plain_values(config: AttentionConfig) -> dict[str, Any]:
    """The values as their declared types, from those of JSON and YAML.

    Raises:
        ValueError: as `AttentionConfig`, for one field alone.
    """
    hints, values = get_type_hints(type(config)), {}
    for item in fields(config):
        value = getattr(config, item.name)
        expected = get_args(hints[item.name])
        if get_origin(hints[item.name]) is tuple:
            members = value if isinstance(value, list | tuple) else [value]
            checked = (_checked(item.name, member, expected[:1], item.metadata) for member in members)
            values[item.name] = tuple(map(str, checked))
        else:
            values[item.name] = _checked(item.name, value, expected or (hints[item.name],), item.metadata)
    return values


def _checked(name: str, value: Any, expected: tuple[Any, ...], limits: Any) -> Any:
    """`value`, if it is one of the choices or has one of the types expected and is within the limits."""
    choices = [choice for part in expected for choice in (get_args(part) or (part,))]
    if float in choices and type(value) is int:
        value = float(value)
    if int in choices and str in choices and isinstance(value, str) and value.isdigit():  # as a command line has it
        value = int(value)
    if type(value) not in choices and value not in choices:
        named = (choice.__name__ if isinstance(choice, type) else repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r}: expected {' or '.join(named)}".replace("NoneType", "None"))
    for limit, (holds, words) in _LIMITS.items():
        if value is not None and limit in limits and not holds(value, limits[limit]):
            raise ValueError(f"{name}={value}: expected {words} {limits[limit]}")
    return value

"""A pass through a linearized model, from the decoder's inputs to each layer's attention.

In the order in which they run: `find_sequences` takes padding out at the decoder's entry, `provide_cache_layer` finds
each attention module's part of the cache, and `lolcats_attention`, which transformers calls after projections and
rotary embedding, computes hybrid attention in the module's linear heads and softmax attention in all others;
`restore_batch` puts the padding back. What the caller wants and what they find out travels as one `AttentionCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer, StaticLayer

from lolcats.config.attention import AttentionConfig
from lolcats.modeling.cache import (
    PLACEHOLDER,
    AttentionCacheLayer,
    ExactCacheLayer,
    HybridCacheLayer,
    Rows,
    given_cache,
    recurrent_layers,
)
from lolcats.modeling.softmax import Visible, softmax_attention
from lolcats.ops import Scoring
from lolcats.ops.eight_bits import pack
from lolcats.ops.hybrid_attention.state import needs_gradient

ATTENTION_NAME = "lolcats"
# Keyword under which an `AttentionCall` travels from the caller through transformers' modules.
ATTENTION_CALL = "attention_call"
NOT_QUANTIZED = (
    "a quantized cache has no effect on linear attention, whose states stay as they are: use the default cache, and"
    " set_attention(cache_bits=8) for the keys and values of windows and of heads that keep softmax attention"
)
_OWN_MASK = (
    "linear attention cannot express masks of one's own with 4 dimensions, which static caches need too: give an"
    " attention_mask [batch, tokens], and a DynamicCache"
)


@dataclass(frozen=True)
class Packing:
    """Which tokens of a batch [B, T] are no padding: one row [1, N] of them, one sequence after the other, and back.

    Attributes:
        token_N: int64, their places among the batch's B * T.
        packs_layers: it is applied to the decoder's inputs, so that layers get one row; else to queries, keys and
            values, because layers without attention know no sequences in a row.
    """

    batch: int
    tokens: int
    token_N: Tensor
    packs_layers: bool = True

    def pack(self, x: Tensor, dim: int = 0) -> Tensor:
        """[..., B, T, ...], B at `dim`, to [..., 1, N, ...]."""
        return x.flatten(dim, dim + 1).index_select(dim, self.token_N.to(x.device)).unsqueeze(dim)

    def unpack(self, y_1N: Tensor) -> Tensor:
        """[1, N, ...] to [B, T, ...], with zeros for padding."""
        zeros = y_1N.new_zeros(self.batch * self.tokens, *y_1N.shape[2:])
        return zeros.index_copy(0, self.token_N.to(y_1N.device), y_1N[0]).unflatten(0, (self.batch, self.tokens))


class Observed(NamedTuple):
    """An attention layer of a softmax pass, with its `HybridAttention`, None without linear heads.

    q and y_softmax are [B, H, T, D], k and v [B, G, T, D]; B is 1 with `visible.cu_seqlens`, a tensor.
    """

    module: Any
    layer_idx: int
    q: Tensor
    k: Tensor
    v: Tensor
    y_softmax: Tensor
    scoring: Scoring
    visible: Visible


@dataclass(frozen=True)
class AttentionCall:
    """The keyword argument `attention_call` of a linearized model or its decoder, for one forward pass.

    A cache filled in one mode cannot be used in the other.

    Attributes:
        mode: "hybrid", what the layers were made for, or "softmax", the attention of the base model.
        observe: called with every attention layer of a softmax pass over whole sequences (use_cache=False).
        gates: by layer, [G] shares of softmax attention in the output of each KV head, the rest being its hybrid
            attention; in a hybrid pass over whole sequences, for layers without exact heads.
        backend: of hybrid attention, see `lolcats.ops.hybrid_attention`.
        rows: the pass's sequences; None: its rows, which have no padding. This and what follows is filled in on the
            way to the attention function.
        packing: makes the batch of the caller one row without padding; None: `rows` are not packed, or were already.
        layer: the cache layer that attention adds the tokens to; None: there is no cache.
        operator: computes the attention of a compiled layer.
    """

    mode: str = "hybrid"
    observe: Callable[[Observed], None] | None = None
    gates: Mapping[int, Tensor] | None = None
    backend: str = "auto"
    rows: Rows | None = None
    packing: Packing | None = None
    layer: Any = None
    operator: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("hybrid", "softmax"):
            raise ValueError(f"mode={self.mode!r}: expected hybrid or softmax")
        if self.observe is not None and self.mode != "softmax":
            raise ValueError("observe sees softmax attention: set mode='softmax'")
        if self.gates is not None and self.mode != "hybrid":
            raise ValueError("gates mix hybrid attention with softmax attention: set mode='hybrid'")


HYBRID = AttentionCall()
SOFTMAX = AttentionCall(mode="softmax")


def find_sequences(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the decoder: which tokens form a sequence, without padding and with documents apart.

    If there are any, the decoder gets one row of the real tokens, sequence after sequence, and `restore_batch` makes
    the batch of what it returns. Models with recurrent layers get the batch as it is: their attention packs it.

    Padding is what the mask says. Missing position ids are made of it as `generate` does. Linear attention knows
    positions from the rotary embedding, so that moved ones change its output.

    As in transformers, position ids that do not count up by one begin a document, if there is neither an
    attention mask nor a cache. transformers puts the borders into its dense masks, for most families and only
    with use_cache=False; here all families have them.

    `rotary_positions` [B, T] are position ids that begin no document, however they count: nothing of them is read
    on the host, so that a CUDA graph can hold the pass. An empty mask keeps transformers from reading them.

    Raises:
        ValueError: a mask that is not [batch, tokens]; more tokens than one of the chunks within which layers attend; a
            hybrid pass, but the attention implementation was changed, which brings softmax attention back.
    """
    # transformers gives layers that share keys the last `logits_to_keep` alone: a state needs all.
    kwargs.pop("logits_to_keep", None)
    call: AttentionCall = kwargs.get(ATTENTION_CALL) or HYBRID
    name = module.config._attn_implementation  # type: ignore[union-attr]
    if name != ATTENTION_NAME and call.mode == "hybrid":
        raise ValueError(
            f"attn_implementation={name!r}: with it, linearized layers would compute softmax attention; call"
            f' set_attn_implementation("{ATTENTION_NAME}"), and use attention_call=AttentionCall(mode="softmax") for'
            " the softmax attention of the base model"
        )
    if call.rows is not None or name != ATTENTION_NAME:
        return args, kwargs
    if len(args) > 1:
        raise ValueError("only input_ids may be a positional argument of the decoder of a linearized model")
    kwargs |= dict(zip(("input_ids",), args, strict=False))
    inputs = kwargs.get("input_ids")
    batch, tokens = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]
    given, position_ids, cache = kwargs.get("attention_mask"), kwargs.get("position_ids"), given_cache(kwargs)
    past, chunk = 0 if cache is None else cache.get_seq_length(), getattr(module.config, "attention_chunk_size", None)
    if chunk and tokens + past > chunk:
        raise ValueError(f"layers of this model attend within chunks: linearized it takes rows of up to {chunk} tokens")
    if (rotary_BT := kwargs.pop("rotary_positions", None)) is not None:
        no_mask = rotary_BT.new_empty(len(rotary_BT), 1, 1, 0)
        return (), kwargs | {"position_ids": rotary_BT, "attention_mask": no_mask, "use_cache": False}
    kwargs[ATTENTION_CALL] = replace(call, rows=Rows(past, past + tokens))  # through which layers share tables
    if given is not None:
        return (), _without_padding(module.config, kwargs, past, batch, tokens)
    if position_ids is not None and position_ids.dim() == 2 and cache is None:
        return (), _documents(module.config, kwargs, batch, tokens)
    return (), kwargs


@torch.compiler.disable  # masks grow
def _without_padding(config: Any, kwargs: dict[str, Any], past: int, batch: int, tokens: int) -> dict[str, Any]:
    """The decoder's arguments for what its mask says of padding."""
    given = kwargs["attention_mask"]
    if not isinstance(given, Tensor) or given.dim() != 2:
        raise ValueError(_OWN_MASK)
    mask = given[:, : past + tokens].bool()
    if mask.shape != (batch, past + tokens):
        raise ValueError(f"attention_mask is {list(given.shape)}, not {[batch, past + tokens]} (with cached tokens)")
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = (mask.long().cumsum(1) - 1).clamp_min(0)[:, past : past + tokens]
    if bool(mask.all()):
        return kwargs
    call, past_B, real_BT = kwargs[ATTENTION_CALL], mask[:, :past].sum(1), mask[:, past:]
    if tokens == 1 and bool(real_BT.all()):
        return kwargs | {ATTENTION_CALL: replace(call, rows=replace(call.rows, past_B=past_B))}
    held, counts = torch.stack([past_B, real_BT.sum(1)]).tolist()
    rows = Rows.packed([*enumerate(held)], counts, past, past + tokens, given.device)
    return _packed(config, kwargs, rows, Packing(batch, tokens, real_BT.flatten().nonzero()[:, 0]))


def _documents(config: Any, kwargs: dict[str, Any], batch: int, tokens: int) -> dict[str, Any]:
    """The decoder's arguments for the documents that begin where positions do not count up by one.

    Raises:
        ValueError: there are some, and layers without attention carry their state from one to the next.
    """
    begins_BT = pad(kwargs["position_ids"].diff(dim=1) != 1, (1, 0))
    if not bool(begins_BT.any()):
        return kwargs
    if recurrent := recurrent_layers(config):
        raise ValueError(
            f"position_ids separate documents, but layers {recurrent} of this model carry their state from one to the"
            " next: give each document a row of its own"
        )
    begins_BT[:, 0] = True
    first_S = begins_BT.expand(batch, -1).flatten().nonzero()[:, 0]
    counts = pad(first_S, (0, 1), value=batch * tokens).diff().tolist()
    rows = Rows.packed([(n, 0) for n in range(len(counts))], counts, 0, tokens, first_S.device)
    packing = Packing(batch, tokens, torch.arange(batch * tokens, device=first_S.device))
    return _packed(config, kwargs | {"use_cache": False}, rows, packing)


def _packed(config: Any, kwargs: dict[str, Any], rows: Rows, packing: Packing) -> dict[str, Any]:
    """The decoder's arguments for a packed pass: all that are [B, T, ...] become [1, N, ...]."""
    if len(packing.token_N) == 0 or recurrent_layers(config):  # layers cannot do without tokens
        packing = replace(packing, packs_layers=False)
    call = replace(kwargs[ATTENTION_CALL], rows=rows, packing=packing)
    if not packing.packs_layers:
        return kwargs | {ATTENTION_CALL: call}
    position_ids, shape = kwargs["position_ids"], (packing.batch, packing.tokens)
    position_ids = position_ids.expand(*position_ids.shape[:-2], *shape)
    packed = {n: packing.pack(x) for n, x in kwargs.items() if isinstance(x, Tensor) and x.shape[:2] == shape}
    packed |= {ATTENTION_CALL: call, "position_ids": packing.pack(position_ids, position_ids.dim() - 2)}
    packed["attention_mask"] = position_ids.new_empty(1, 1, 1, 0)  # else transformers would look for borders itself
    return kwargs | packed


def restore_batch(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of the decoder: what it returns of a packed row, as a batch."""
    call: AttentionCall = kwargs.get(ATTENTION_CALL) or HYBRID
    if call.packing is None or not call.packing.packs_layers:
        return
    packing, tokens = call.packing, len(call.packing.token_N)

    def unpacked(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(unpacked, x))
        if isinstance(x, Tensor) and x.shape[:2] == (1, tokens) and x.dim() == 3:
            return packing.unpack(x)
        if isinstance(x, Tensor) and len(x) == tokens and x.dim() == 2:  # router's logits
            return packing.unpack(x[None]).flatten(0, 1)
        return x

    for name, x in output.items():
        output[name] = unpacked(x)


def provide_cache_layer(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of attention modules: puts the cache layer that attention fills into the `AttentionCall`.

    The attention function needs a handle to it, and transformers hands it only keys and values. A layer of the kind
    that the module needs takes the place of an empty one.

    Raises:
        ValueError: the cache is static, or holds tokens of this layer in another form.
    """
    cache = given_cache(kwargs)
    if cache is None:
        return args, kwargs
    call = kwargs.get(ATTENTION_CALL) or HYBRID
    index: Any = module.layer_idx
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, PLACEHOLDER):  # transformers keeps nothing for it, as it attends over an earlier layer's keys
        layer = None
    if isinstance(layer, StaticLayer):
        raise ValueError("static caches hold buffers of keys, which linear layers do not have: use a DynamicCache")
    if hasattr(layer, "_dequantize"):
        raise ValueError(NOT_QUANTIZED)
    is_linear = call.mode == "hybrid" and "linear_attention" in module._modules
    kind = HybridCacheLayer if is_linear else ExactCacheLayer
    if not isinstance(layer, kind):
        tokens = 0 if layer is None else layer.get_seq_length()
        if tokens or not isinstance(layer, (DynamicLayer, AttentionCacheLayer, type(None))):
            raise ValueError(
                f"layer {index} of the cache is a {type(layer).__name__} with {tokens} tokens of another model or mode;"
                " start with an empty cache"
            )
        layer = kind(getattr(layer, "is_sliding", False))
        cache.layers[index : index + 1] = [layer]
    return args, kwargs | {ATTENTION_CALL: replace(call, layer=layer)}


def lolcats_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as `transformers.AttentionInterface` wants it.

    Args:
        module: the attention module.
        query: [B, H, T, D]; key, value: [B, G, K, D], after rotary embedding.
        attention_mask: not used; `find_sequences` has said in the `AttentionCall` what is padding or another document.
        dropout: of attention weights. Softmax layers apply it; linear layers have no weights to drop and
            ignore it.
        sliding_window: the layer's native window. Softmax layers keep to it; linear layers have their own.

    Returns:
        [B, T, H, D], and None in place of attention weights.
    """
    call: AttentionCall = kwargs.get(ATTENTION_CALL) or HYBRID
    if call.operator is not None:
        return call.operator(query, key, value, scaling, sliding_window, softcap, s_aux), None
    layer, tokens = call.layer, query.shape[2]
    if torch.compiler.is_compiling() and (layer is not None or key.shape[2] != tokens):
        settings = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        return _not_compiled(module, query, key, value, None, s_aux=s_aux, **settings, **kwargs)
    if layer is not None:  # of keys shared with an earlier layer, the new ones
        key, value = key[:, :, -tokens:], value[:, :, -tokens:]
    linear_attention: Any = module._modules.get("linear_attention")  # `getattr` takes ten times as long
    index: Any = module.layer_idx
    hybrid = linear_attention is not None and call.mode == "hybrid"
    past, whole = 0 if layer is None else layer.tokens, key.shape[2] == tokens
    rows = call.rows or Rows(past, past + tokens)
    packing = None if call.packing is None or call.packing.packs_layers else call.packing
    if packing is not None:
        query, key, value = (packing.pack(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value))
    cu_seqlens = None if rows.cu_seqlens is None else rows.cu_seqlens.to(query.device)
    scoring = Scoring(s_aux, scaling, softcap)
    visible, packed = Visible(sliding_window), False  # of heads with softmax attention
    attention: AttentionConfig | None = getattr(module, "attention_config", None)
    if attention is not None and call.mode == "hybrid" and sliding_window is None:
        packed = attention.cache_bits == 8 and not needs_gradient(query, key, value)
        if attention.exact_tokens:
            visible = Visible(attention.exact_tokens, attention.sinks)

    def softmax(q: Tensor, k: Tensor, v: Tensor, own: Scoring, kept: ExactCacheLayer | None) -> Tensor:
        """Of heads with softmax attention, which see these keys after those that `kept` has."""
        if kept is not None:
            k, v, seen = kept.append(k, v, rows, visible, packed)
        else:
            seen = visible._replace(cu_seqlens=rows.host and rows.host[0])
            k, v = (pack(k), pack(v)) if packed else (k, v)
        return softmax_attention(q, k, v, own, seen, dropout=dropout)

    if not hybrid:
        y_BHTD = softmax(query, key, value, scoring, layer)
        if call.observe is not None:
            if not whole or layer is not None:
                raise ValueError("observe sees whole sequences: call the model with use_cache=False")
            seen = visible._replace(cu_seqlens=cu_seqlens)
            call.observe(Observed(linear_attention, index, query, key, value, y_BHTD, scoring, seen))
        return _merged_heads(y_BHTD, packing)

    if layer is None and not whole:
        raise RuntimeError(
            f"layer {index}: {key.shape[2]} keys for {tokens} queries, but no linear state; the"
            " module's cache hook is missing. Load or convert the model again"
        )
    if layer is not None and call.gates is not None:
        raise ValueError("gates see whole sequences: call the model with use_cache=False")
    heads = linear_attention.heads
    q_BHTD, k_BGTD, v_BGTD, linear_scoring = query, key, value, scoring
    y_exact = None
    if heads.exact:
        (q, q_BHTD), (k, k_BGTD), (v, v_BGTD) = (heads.split(x) for x in (query, key, value))
        exact_scoring = scoring
        if s_aux is not None:
            exact_scoring, linear_scoring = (scoring._replace(sink_logits=x) for x in heads.split(s_aux, 0))
        y_exact = softmax(q, k, v, exact_scoring, None if layer is None else layer.exact)
    arguments: dict[str, Any] = {"cu_seqlens": cu_seqlens, "shared": rows.shared}
    if layer is not None:
        arguments |= {"state": layer.take(rows), "return_state": True}
    y_BHTD, state = linear_attention(q_BHTD, k_BGTD, v_BGTD, linear_scoring, backend=call.backend, **arguments)
    if layer is not None:
        layer.advance(state, rows)
    if y_exact is not None:
        y_BHTD = heads.join(y_exact, y_BHTD)
    if call.gates is not None:
        gate_H = call.gates[index].repeat_interleave(query.shape[1] // key.shape[1])
        y_BHTD = torch.lerp(y_BHTD, softmax(query, key, value, scoring, None), gate_H[:, None, None].to(y_BHTD.dtype))
    return _merged_heads(y_BHTD, packing)


def _merged_heads(y_BHTD: Tensor, packing: Packing | None) -> tuple[Tensor, None]:
    y_BTHD = y_BHTD.transpose(1, 2)
    y_BTHD = y_BTHD if packing is None else packing.unpack(y_BTHD)
    return y_BTHD.contiguous(), None  # contiguous: some families (AFMoE) take a view of it


# Between two compiled graphs: states are written in place and lengths grow; in a graph, each length would be a reason
# to compile or to capture again. What lies between the layers' attention compiles with fixed shapes.
_not_compiled = torch.compiler.disable(lolcats_attention)


def lolcats_mask(*sizes: Any, use_vmap: bool = False, **kwargs: Any) -> None:
    """None: causality and native windows are the layers' own business, padding and documents that of `find_sequences`.

    Raises:
        ValueError: a mask function of one's own (images whose tokens see each other).
    """
    if use_vmap:
        raise ValueError(_OWN_MASK)


AttentionInterface.register(ATTENTION_NAME, lolcats_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lolcats_mask)

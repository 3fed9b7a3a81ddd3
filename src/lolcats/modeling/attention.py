"""The attention and mask functions that transformers calls under the name "lolcats".

Every attention module of a converted model calls `lolcats_attention` after its projections and rotary
embedding. Modules with a `linear_attention` compute hybrid attention in their linear heads, unless the forward pass was
called for softmax attention (`AttentionCall`); all other heads compute the softmax attention of the original model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from lolcats.config.attention import AttentionConfig
from lolcats.modeling.cache import ExactCacheLayer, recurrent_layers
from lolcats.modeling.call import ATTENTION_CALL, HYBRID, AttentionCall, Rows
from lolcats.modeling.compat import given_cache
from lolcats.modeling.heads import HeadSplit
from lolcats.modeling.softmax import softmax_attention, wants_gradient
from lolcats.ops.eight_bits import pack
from lolcats.ops.packing import Packing

ATTENTION_NAME = "lolcats"
_OWN_MASK = "masks of one's own with 4 dimensions cannot be expressed in linear attention"


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
        attention_mask: what `lolcats_mask` made, [B, 1, 1, K] bool, False for padding; None or an empty one: everything
            is seen, of packed documents (see `find_sequences`) everything in the query's own.
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
        return _not_compiled(module, query, key, value, attention_mask, s_aux=s_aux, **settings, **kwargs)
    if layer is not None:  # of keys shared with an earlier layer, the new ones
        key, value = key[:, :, -tokens:], value[:, :, -tokens:]
    linear_attention: Any = module._modules.get("linear_attention")  # `getattr` takes ten times as long
    index: Any = module.layer_idx
    hybrid = linear_attention is not None and call.mode == "hybrid"
    mask = _padding_mask(attention_mask, query)
    packing = None if call.packing is None else call.packing.to(query.device)
    rows = None if layer is None else call.rows or Rows(layer.tokens)
    window, sinks, packed = sliding_window, None, False
    attention: AttentionConfig | None = getattr(module, "attention_config", None)
    if attention is not None and call.mode == "hybrid":
        packed = attention.cache_bits == 8 and not wants_gradient(query, key, value)
        if attention.exact_tokens and sliding_window is None:
            window, sinks = attention.exact_tokens, attention.sinks
    exact_packed = packed and sliding_window is None

    def softmax(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, kept: ExactCacheLayer | None) -> Tensor:
        """Of heads with softmax attention, which see these keys after those that `kept` has."""
        where: dict[str, Any] = {}
        if kept is not None:
            assert rows is not None
            k, v, where = kept.append(k, v, rows, window, sinks, exact_packed)
        elif exact_packed:
            k, v = pack(k), pack(v)
        if not where and mask is not None:
            real_BK = _last_columns(mask, k.shape[2]).bool()
            where = {"position": torch.where(real_BK, real_BK.cumsum(1) - 1, -1)}
        elif not where and packing is not None:
            where = {"cu_seqlens": packing.documents}
        scoring: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink_logits": sink_logits, "dropout": dropout}
        return softmax_attention(q, k, v, sliding_window=window, sinks=sinks, **scoring, **where)

    if not hybrid:
        y_BHTD = softmax(query, key, value, s_aux, layer)
        if call.observe is not None:
            if key.shape[2] != tokens or layer is not None:
                raise ValueError("observe sees whole sequences: call the model with use_cache=False")
            tensors = {"q": query, "k": key, "v": value, "y_softmax": y_BHTD}
            seen: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink_logits": s_aux, "cu_seqlens": None}
            if packing is not None:
                tensors = {name: packing.pack(x) for name, x in tensors.items()}
                seen["cu_seqlens"] = packing.cu_seqlens
            seen["sliding_window"] = sliding_window
            call.observe(module=linear_attention, layer_idx=index, **tensors, call=seen)
        return _merged_heads(y_BHTD)

    if layer is None and key.shape[2] != tokens:
        raise RuntimeError(
            f"layer {index}: {key.shape[2]} keys for {tokens} queries, but no linear state; the"
            " module's cache hook is missing. Load or convert the model again"
        )
    if layer is not None and call.gates is not None:
        raise ValueError("gates see whole sequences: call the model with use_cache=False")
    heads: HeadSplit = linear_attention.heads
    q_BHTD, k_BGTD, v_BGTD, sink_logits = query, key, value, s_aux
    y_exact = None
    if heads.exact:
        (q, q_BHTD), (k, k_BGTD), (v, v_BGTD) = (heads.split(x) for x in (query, key, value))
        exact_sinks, sink_logits = (None, None) if s_aux is None else heads.split(s_aux, 0)
        y_exact = softmax(q, k, v, exact_sinks, None if layer is None else layer.exact)
    arguments: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink_logits": sink_logits, "packed": packed}
    if packing is not None:
        q_BHTD, k_BGTD, v_BGTD = (packing.pack(x) for x in (q_BHTD, k_BGTD, v_BGTD))
        arguments |= {"cu_seqlens": packing.cu_seqlens, "shared": packing.shared}
    if rows is not None:
        arguments |= {"state": layer.take(rows), "return_state": True, "shared": rows.shared}
    y_BHTD, state = linear_attention(q_BHTD, k_BGTD, v_BGTD, backend=call.backend, **arguments)
    if rows is not None:
        layer.advance(state, rows, tokens)
    if packing is not None:
        y_BHTD = packing.unpack(y_BHTD, len(query), tokens)
    if y_exact is not None:
        y_BHTD = heads.join(y_exact, y_BHTD)
    if call.gates is not None:
        gate_H = call.gates[index].repeat_interleave(query.shape[1] // key.shape[1])
        y_BHTD = torch.lerp(y_BHTD, softmax(query, key, value, s_aux, None), gate_H[:, None, None].to(y_BHTD.dtype))
    return _merged_heads(y_BHTD)


def _merged_heads(y_BHTD: Tensor) -> tuple[Tensor, None]:
    return y_BHTD.transpose(1, 2).contiguous(), None  # contiguous: some families (AFMoE) take a view of it


@torch.compiler.disable
def _not_compiled(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`lolcats_attention` between two compiled graphs.

    States are written in place and lengths grow; in a graph, each length would be a reason to compile or to
    capture again. What lies between the layers' attention compiles with fixed shapes.
    """
    return lolcats_attention(*args, **kwargs)


def lolcats_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The padding mask that `lolcats_attention` gets, made once per forward pass.

    Causality and native windows are the layers' own business, packed documents that of `find_sequences`.

    Returns:
        [B, 1, 1, past + q_length] bool, False for padding; None without padding. transformers hands masks with 4
        dimensions through as they are, so a mask that `generate` made reaches the layers.

    Raises:
        ValueError: a mask function of one's own (images whose tokens see each other), or a chunked layer beyond its
            first chunk.
    """
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    if chunk is not None and chunk == kwargs.get("local_size") and chunk < kv_offset + kv_length:
        raise ValueError(f"layers of this model attend within chunks: it takes up to {chunk} tokens when linearized")
    if use_vmap:
        raise ValueError(_OWN_MASK)
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, : q_offset + q_length]
    capturing = attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()  # no values can be read then
    if not torch.compiler.is_compiling() and not capturing and bool(attention_mask.all()):
        return None
    return attention_mask[:, None, None]


def find_sequences(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the decoder: which tokens form a sequence, without padding and with documents apart.

    Padding is what the mask says; linear heads get a `Packing` instead. Missing position ids are made of it as
    `generate` does. Linear attention knows positions from the rotary embedding, so that moved ones change its output.

    As in transformers, position ids that do not count up by one begin a document, if there is neither an
    attention mask nor a cache. transformers puts the borders into its dense masks, for most families and only
    with use_cache=False; here they travel as a `Packing`, for all.

    `rotary_positions` [B, T] are position ids that begin no document, however they count: nothing of them is read
    on the host, so that a CUDA graph can hold the pass. An empty mask keeps transformers from reading them.

    Raises:
        ValueError: a hybrid pass, but the attention implementation was changed, which brings softmax attention back.
    """
    call: AttentionCall = kwargs.get(ATTENTION_CALL) or HYBRID
    name = module.config._attn_implementation  # type: ignore[union-attr]
    if name != ATTENTION_NAME and call.mode == "hybrid":
        raise ValueError(
            f"attn_implementation={name!r}: with it, linearized layers would compute softmax attention; call"
            f' set_attn_implementation("{ATTENTION_NAME}"), and use attention_call=AttentionCall(mode="softmax") for'
            " the softmax attention of the base model"
        )
    if (rotary_BT := kwargs.pop("rotary_positions", None)) is not None:
        no_mask = rotary_BT.new_empty(len(rotary_BT), 1, 1, 0)
        return args, kwargs | {"position_ids": rotary_BT, "attention_mask": no_mask, "use_cache": False}
    given = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if call.rows is not None or len(args) > 2:
        return args, kwargs
    inputs = args[0] if args else kwargs.get("input_ids")
    batch, tokens = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]
    position_ids, cache = kwargs.get("position_ids"), given_cache(kwargs)
    if given is None:
        if position_ids is None or position_ids.dim() != 2 or cache is not None:
            return args, kwargs
        return args, kwargs | _documents(module.config, position_ids, batch, call)
    return args, kwargs | _without_padding(given, cache, tokens, position_ids, call)


@torch.compiler.disable  # masks grow
def _without_padding(
    given: Any, cache: Any, tokens: int, position_ids: Tensor | None, call: AttentionCall
) -> dict[str, Any]:
    """The decoder's arguments for what its mask, or one for each kind of layer (`generate`), says of padding."""
    masks = given.values() if isinstance(given, dict) else (given,)
    found = [_without_axes(mask) for mask in masks if mask is not None and mask.numel()]
    mask = max((mask for mask in found if mask.dim() == 2), key=lambda mask: mask.shape[1], default=None)
    if mask is None:  # those of layers without attention are of the new tokens alone
        return {}
    past = 0 if cache is None else cache.get_seq_length()
    mask = mask[:, : past + tokens].bool()
    if position_ids is None:
        position_ids = (mask.long().cumsum(1) - 1).clamp_min(0)[:, past : past + tokens]
    if bool(mask.all()):
        return {ATTENTION_CALL: replace(call, rows=Rows(past)), "position_ids": position_ids}
    packing, rows = Packing.of_mask(mask[:, -tokens:]), Rows.masked(past, _last_columns(mask, past + tokens))
    return {ATTENTION_CALL: replace(call, packing=packing, rows=rows), "position_ids": position_ids}


def _documents(config: Any, position_ids: Tensor, batch: int, call: AttentionCall) -> dict[str, Any]:
    """The decoder's arguments for the documents that begin where positions do not count up by one.

    Raises:
        ValueError: there are some, and layers without attention carry their state from one to the next, or attend
            within chunks that are shorter than a row.
    """
    begins_BT = pad(position_ids.diff(dim=1) != 1, (1, 0))
    if not bool(begins_BT.any()):
        return {}
    if recurrent := recurrent_layers(config):
        raise ValueError(
            f"position_ids separate documents, but layers {recurrent} of this model carry their state from one to the"
            " next: give each document a row of its own"
        )
    if (chunk := getattr(config, "attention_chunk_size", None)) and begins_BT.shape[1] > chunk:
        raise ValueError(
            f"position_ids separate documents in rows of {begins_BT.shape[1]} tokens, but some layers of this model"
            f" attend within chunks of {chunk}: give each document a row of its own"
        )
    begins_BT[:, 0] = True
    first_S = begins_BT.expand(batch, -1).flatten().nonzero()[:, 0]
    borders = pad(first_S, (0, 1), value=batch * begins_BT.shape[1]).int()
    packing = Packing(borders, documents=borders.cpu())
    no_mask = position_ids.new_empty(batch, 1, 1, 0)  # else transformers would look for borders itself
    return {ATTENTION_CALL: replace(call, packing=packing), "attention_mask": no_mask, "use_cache": False}


def _padding_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """[B, past + T], False for padding; None: there is none."""
    if mask is None or mask.numel() == 0:
        return None
    mask = _without_axes(mask.to(query.device))
    if mask.dim() != 2:
        raise ValueError(f"expected an attention_mask [batch, tokens], got {list(mask.shape)}: {_OWN_MASK}")
    return mask


def _without_axes(mask: Tensor) -> Tensor:
    """[B, K], if `mask` is [B, 1, 1, K], as `lolcats_mask` makes them."""
    return mask[:, 0, 0] if mask.dim() == 4 and mask.shape[1:3] == (1, 1) else mask


def _last_columns(mask: Tensor, tokens: int) -> Tensor:
    """The padding mask of the last `tokens` tokens."""
    if mask.shape[-1] < tokens:
        raise ValueError(
            f"attention_mask has {mask.shape[-1]} columns for {tokens} tokens; it must cover the cached tokens too"
        )
    return mask[..., -tokens:]


AttentionInterface.register(ATTENTION_NAME, lolcats_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lolcats_mask)

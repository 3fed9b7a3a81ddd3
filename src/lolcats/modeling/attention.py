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
from lolcats.modeling.softmax import softmax_attention
from lolcats.ops.eight_bits import pack
from lolcats.ops.hybrid_attention.state import needs_gradient
from lolcats.ops.packing import Packing

ATTENTION_NAME = "lolcats"
_OWN_MASK = (
    "linear attention cannot express masks of one's own with 4 dimensions, which static caches need too: give an"
    " attention_mask [batch, tokens], and a DynamicCache"
)


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
    packing = None if call.packing is None else call.packing.to(query.device)
    rows = None if layer is None else call.rows or Rows(layer.tokens)
    window, sinks, packed = sliding_window, None, False
    attention: AttentionConfig | None = getattr(module, "attention_config", None)
    if attention is not None and call.mode == "hybrid":
        packed = attention.cache_bits == 8 and not needs_gradient(query, key, value)
        if attention.exact_tokens and sliding_window is None:
            window, sinks = attention.exact_tokens, attention.sinks
    exact_packed = packed and sliding_window is None

    def softmax(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, kept: ExactCacheLayer | None) -> Tensor:
        """Of heads with softmax attention, which see these keys after those that `kept` has."""
        where: dict[str, Any] = {}
        if exact_packed and kept is None:
            k, v = pack(k), pack(v)
        if kept is not None:
            assert rows is not None
            k, v, where = kept.append(k, v, rows, window, sinks, exact_packed)
        elif packing is not None and packing.documents is not None:
            where = {"cu_seqlens": packing.documents}
        elif call.rows is not None and call.rows.real_BT is not None:
            real_BT = call.rows.real_BT.to(k.device)
            where = {"position": torch.where(real_BT, real_BT.cumsum(1) - 1, -1)}
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
        ValueError: a mask that is not [batch, tokens]; more tokens than one of the chunks within which layers attend; a
            hybrid pass, but the attention implementation was changed, which brings softmax attention back.
    """
    call: AttentionCall = kwargs.get(ATTENTION_CALL) or HYBRID
    name = module.config._attn_implementation  # type: ignore[union-attr]
    if name != ATTENTION_NAME and call.mode == "hybrid":
        raise ValueError(
            f"attn_implementation={name!r}: with it, linearized layers would compute softmax attention; call"
            f' set_attn_implementation("{ATTENTION_NAME}"), and use attention_call=AttentionCall(mode="softmax") for'
            " the softmax attention of the base model"
        )
    if call.rows is not None:
        return args, kwargs
    if len(args) > 1:
        raise ValueError("only input_ids may be a positional argument of the decoder of a linearized model")
    inputs = args[0] if args else kwargs.get("input_ids")
    batch, tokens = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]
    given, position_ids, cache = kwargs.get("attention_mask"), kwargs.get("position_ids"), given_cache(kwargs)
    past, chunk = 0 if cache is None else cache.get_seq_length(), getattr(module.config, "attention_chunk_size", None)
    if chunk and tokens + past > chunk:
        raise ValueError(f"layers of this model attend within chunks: linearized it takes rows of up to {chunk} tokens")
    if (rotary_BT := kwargs.pop("rotary_positions", None)) is not None:
        no_mask = rotary_BT.new_empty(len(rotary_BT), 1, 1, 0)
        return args, kwargs | {"position_ids": rotary_BT, "attention_mask": no_mask, "use_cache": False}
    if given is None:
        if position_ids is None or position_ids.dim() != 2 or cache is not None:
            return args, kwargs | {ATTENTION_CALL: replace(call, rows=Rows(past))}  # through which layers share tables
        return args, kwargs | _documents(module.config, position_ids, batch, call)
    return args, kwargs | _without_padding(given, past, tokens, position_ids, call)


@torch.compiler.disable  # masks grow
def _without_padding(
    given: Any, past: int, tokens: int, position_ids: Tensor | None, call: AttentionCall
) -> dict[str, Any]:
    """The decoder's arguments for what its mask says of padding."""
    if not isinstance(given, Tensor) or given.dim() != 2:
        raise ValueError(_OWN_MASK)
    mask = given[:, : past + tokens].bool()
    if position_ids is None:
        position_ids = (mask.long().cumsum(1) - 1).clamp_min(0)[:, past : past + tokens]
    if bool(mask.all()):
        return {ATTENTION_CALL: replace(call, rows=Rows(past)), "position_ids": position_ids}
    if mask.shape[1] < past + tokens:
        raise ValueError(
            f"attention_mask has {mask.shape[1]} columns for {past + tokens} tokens: it must cover the cached tokens"
        )
    real_BT = mask[:, past:]
    rows = Rows(past, mask[:, :past].sum(1), real_BT, even=False)
    call = replace(call, packing=Packing.of_mask(real_BT), rows=rows)
    return {ATTENTION_CALL: call, "position_ids": position_ids}


def _documents(config: Any, position_ids: Tensor, batch: int, call: AttentionCall) -> dict[str, Any]:
    """The decoder's arguments for the documents that begin where positions do not count up by one.

    Raises:
        ValueError: there are some, and layers without attention carry their state from one to the next.
    """
    begins_BT = pad(position_ids.diff(dim=1) != 1, (1, 0))
    if not bool(begins_BT.any()):
        return {}
    if recurrent := recurrent_layers(config):
        raise ValueError(
            f"position_ids separate documents, but layers {recurrent} of this model carry their state from one to the"
            " next: give each document a row of its own"
        )
    begins_BT[:, 0] = True
    first_S = begins_BT.expand(batch, -1).flatten().nonzero()[:, 0]
    borders = pad(first_S, (0, 1), value=batch * begins_BT.shape[1]).int()
    packing = Packing(borders, documents=borders.cpu())
    no_mask = position_ids.new_empty(batch, 1, 1, 0)  # else transformers would look for borders itself
    return {ATTENTION_CALL: replace(call, packing=packing), "attention_mask": no_mask, "use_cache": False}


AttentionInterface.register(ATTENTION_NAME, lolcats_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lolcats_mask)

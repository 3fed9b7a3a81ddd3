"""Exact heads that keep all keys: vLLM's own attention, all heads of a layer in one call."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadataBuilder


@cache
def _for_whole_layers(backend: Any) -> Any:
    """An attention backend that plans its kernels for all exact heads of a layer: by their number, metadata."""
    inner: Any = backend.get_builder_cls()

    class Builder(AttentionMetadataBuilder[dict[int, Any]]):
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            layers: Any = vllm_config.compilation_config.static_forward_context
            ours = [layers[name] for name in layers if name in layer_names]  # as they run
            whole = {layer.layer_name: layer for head in ours for layer in head.whole}
            self.builders, self.first = {}, dict[int, str]()
            for count in {layer.num_kv_heads for layer in whole.values()}:
                own, names = copy(vllm_config), [name for name in whole if whole[name].num_kv_heads == count]
                own.compilation_config = copy(vllm_config.compilation_config)
                own.compilation_config.static_forward_context = {name: whole[name] for name in names}
                spec = replace(kv_cache_spec, num_kv_heads=count, page_size_padded=None)
                self.builders[count] = inner(spec, names, own, device)
                if _plans(self.builders[count], [whole[name] for name in names]):
                    self.first[count] = names[0]
                # FlashAttention's plan: by the first of the layers, not by calls of the host before each pass.
                self.builders[count].aot_schedule = False
            self.reorder_batch_threshold = next(iter(self.builders.values())).reorder_batch_threshold

        @classmethod
        def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
            return inner.get_cudagraph_support(vllm_config, kv_cache_spec)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> dict[int, Any]:
            built = {count: own.build(0, common_attn_metadata, fast_build) for count, own in self.builders.items()}
            return self._with_plans(built)

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> dict[int, Any]:
            built = {n: own.build_for_cudagraph_capture(common_attn_metadata) for n, own in self.builders.items()}
            return self._with_plans(built)

        def _with_plans(self, built: dict[int, Any]) -> dict[int, Any]:
            for count, layer in self.first.items():
                built[count].planned_by = layer, self.builders[count]
            return built

    class Backend(backend):
        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    return Backend


class ExactHeads(nn.Module):
    """Softmax attention of some of a layer's KV heads, in one call. To vLLM each is a layer of its own.

    So the pages of all exact heads are equally large and share few tables, however many heads of a layer are exact:
    vLLM keeps layers with other numbers of heads in tables of their own, each for as many layers as the rarest number.
    """

    heads: Tensor
    is_exact_G1: Tensor
    place_G: Tensor  # of a head among the exact ones

    def __init__(self, softmax: Attention, heads: Sequence[int]) -> None:
        super().__init__()
        self.impl, backend = softmax.impl, softmax.get_attn_backend()
        self.num_kv_heads = softmax.num_kv_heads
        # Ranks may have other heads, but share names. vLLM wants no number in them but the layer's.
        self.prefix = f"{softmax.layer_name}.exact"
        self.whole = unregistered(self._attention(softmax, len(heads), self.prefix, backend))
        single = _for_whole_layers(backend)
        keys: list[Any] = [self._attention(softmax, 1, f"{self.prefix}_{i}", single) for i in range(len(heads))]
        for head in keys:
            head.whole = (self.whole,)  # not a submodule
        self.keys: Any = nn.ModuleList(keys)
        exact = torch.tensor([head in heads for head in range(self.num_kv_heads)])
        self.register_buffer("heads", torch.tensor(heads), persistent=False)
        self.register_buffer("is_exact_G1", exact[:, None], persistent=False)
        self.register_buffer("place_G", exact.cumsum(0).sub(1).clamp_min(0), persistent=False)
        self.memory = self.cache_BGNC = torch.empty(0)
        neighbours, every = heads[-1] - heads[0] == len(heads) - 1, len(heads) == self.num_kv_heads
        self.in_place = every or (neighbours and _takes_strides(backend))
        self.begin = heads[0] * softmax.num_heads // softmax.num_kv_heads
        self.in_one_launch = False

    @staticmethod
    def _attention(softmax: Attention, kv_heads: int, name: str, backend: Any) -> Attention:
        heads, impl = kv_heads * softmax.num_heads // softmax.num_kv_heads, softmax.impl
        return Attention(
            heads,
            softmax.head_size,
            impl.scale,
            num_kv_heads=kv_heads,
            cache_config=get_current_vllm_config().cache_config,
            quant_config=softmax.quant_config,
            logits_soft_cap=impl.logits_soft_cap or None,
            per_layer_sliding_window=softmax.sliding_window,
            attn_backend=backend,
            prefix=name,
            **({"sinks": impl.sinks.data[:heads]} if softmax.has_sink else {}),  # weights are loaded later
        )

    def join(self, linear: Tensor, exact: Tensor) -> Tensor:
        """These heads' output among the linear ones'."""
        exact = exact.flatten(1).unflatten(1, (len(self.heads), -1)).index_select(1, self.place_G)
        return torch.where(self.is_exact_G1, exact, linear.unflatten(1, (self.num_kv_heads, -1))).flatten(1)

    def attend(self, inputs: list[Tensor], output: Tensor) -> None:
        """Write the output of these heads for the tokens of the current forward pass.

        Args:
            inputs: query, key and value [N, heads * D] of all heads of the layer.
            output: [N, heads, D] of the query heads of `whole`, or of the layer if `in_place`.
        """
        context: Any = get_forward_context()
        whole, name = self.whole, self.keys[0].layer_name
        if self.in_place:
            output = output[:, self.begin : self.begin + whole.num_heads]
        if self.memory is not self.keys[0].kv_cache:
            self.memory, self.cache_BGNC = self.keys[0].kv_cache, self._find_keys()
        metadata = context.attn_metadata[name][whole.num_kv_heads]
        query, key, value = self._take(inputs, context.slot_mapping.get(name))
        layer, planner = getattr(metadata, "planned_by", (None, None))
        if layer == whole.layer_name:
            metadata.scheduler_metadata = _plan(planner, metadata)
        whole.impl.forward(whole, query, key, value, self.cache_BGNC, metadata, output=output)

    def _take(self, inputs: list[Tensor], slots: Tensor | None) -> list[Tensor]:
        """Query, key and value of these heads, as vLLM's kernels take them; the cache has what is new."""
        whole = self.whole
        if self.in_one_launch and slots is not None:
            from lolcats.vllm_plugin.take_heads import take_heads

            # Keys and values are not read any more.
            return [take_heads(inputs, self.heads, self.cache_BGNC, slots, _scales(whole)), *inputs[1:]]
        query, key, value = (
            x.unflatten(1, (self.num_kv_heads, -1)).index_select(1, self.heads).flatten(1) for x in inputs
        )
        if whole.query_quant is not None:
            query, _ = whole.query_quant(query, whole._q_scale)
        taken = [x.unflatten(1, (-1, whole.head_size)) for x in (query, key, value)]
        if not whole.attn_backend.forward_includes_kv_cache_update and slots is not None:
            whole.impl.do_kv_cache_update(whole, *taken[1:], self.cache_BGNC, slots)
        return taken

    def _find_keys(self) -> Tensor:
        """The memory of all heads, which are neighbours in a group of vLLM's: equally far from one another."""
        parts = [head.kv_cache for head in self.keys]
        begin = [part.storage_offset() for part in parts]
        apart = (begin[-1] - begin[0]) // max(len(parts) - 1, 1)
        assert begin == [begin[0] + place * apart for place in range(len(parts))], (self.prefix, begin)
        if self.whole.has_sink:
            self.whole.impl.sinks = self.impl.sinks.unflatten(0, (self.num_kv_heads, -1))[self.heads].flatten()
        (blocks, _, tokens, columns), strides = parts[0].shape, parts[0].stride()
        shape = blocks, len(parts), tokens, columns
        cache = parts[0].as_strided(shape, (strides[0], apart, *strides[2:]))
        rounded = self.whole.query_quant is not None
        self.in_one_launch = _is_for_one_launch(self.whole, cache if not rounded else None)
        return cache.view(torch.float8_e4m3fn) if rounded and self.in_one_launch else cache


def unregistered(softmax: Any) -> Any:
    """vLLM's attention of a layer, for whose keys and values no memory will be reserved."""
    del get_current_vllm_config().compilation_config.static_forward_context[softmax.layer_name]
    return softmax


def _takes_strides(backend: Any) -> bool:
    """Whether it may write a layer's exact heads among the others."""
    return backend.get_name() == "FLASH_ATTN" and current_platform.is_cuda()


def _scales(whole: Attention) -> tuple[Tensor, ...]:
    return whole._q_scale, whole._k_scale, whole._v_scale


def _is_for_one_launch(whole: Attention, cache: Tensor | None) -> bool:
    """Whether FlashAttention needs of new tokens what `take_heads` makes. `cache`: None if its queries are rounded."""
    as_kept = whole.kv_cache_dtype in ("fp8", "fp8_e4m3") if cache is None else cache.dtype == whole.dtype
    return as_kept and whole.attn_backend.get_name() == "FLASH_ATTN" and all(x.numel() == 1 for x in _scales(whole))


def _plans(builder: Any, layers: list[Any]) -> bool:
    """Whether one plan of FlashAttention's is right for all these layers."""
    if not getattr(builder, "aot_schedule", False) or envs.VLLM_BATCH_INVARIANT:
        return False
    kept = builder.cache_config.cache_dtype
    same = {(x.impl.sliding_window, x.impl.vllm_flash_attn_version, x.kv_cache_dtype) for x in layers}
    return same == {((-1, -1), 3, kept)}


def _plan(builder: Any, metadata: Any) -> Tensor | None:
    """FlashAttention's, for this pass and as many heads."""
    return builder._get_scheduler_metadata(
        aot_schedule=True,
        batch_size=len(metadata.query_start_loc) - 1,
        cu_query_lens=metadata.query_start_loc,
        max_query_len=metadata.max_query_len,
        seqlens=metadata.seq_lens,
        max_seq_len=metadata.max_seq_len,
        causal=metadata.causal,
        max_num_splits=metadata.max_num_splits,
    )

"""One attention layer as vLLM sees it: layers with a state of fixed size, pages, beside its exact heads.

What exact heads with a window keep has a fixed size too, and lies in pages behind those of the states instead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import aux_stream, direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from lolcats.config.attention import LayerHeads
from lolcats.modeling import LolcatsConfig
from lolcats.modeling.layer import HybridAttention
from lolcats.ops import Scoring, hybrid_attention
from lolcats.ops.hybrid_attention.pages import PagedBatch, StatePages, paged_attention
from lolcats.ops.hybrid_attention.state import Tokens
from lolcats.vllm_plugin.backend import steps_in_pages
from lolcats.vllm_plugin.exact import ExactHeads
from lolcats.vllm_plugin.pages import (
    heads_of_rank,
    is_bounded,
    layer_pages,
    model_pages,
    pages_in_block,
    ring_of,
    state_parts,
    states_of,
)
from lolcats.vllm_plugin.rings import ring_attention

# A prefix may end at multiples of it, if some heads or layers keep all keys. vLLM by itself lets it end where blocks of
# keys and of states both do, and often has no state there.
PREFIX_UNIT = 16
# Tokens of a block of states then. A prompt that ends in the second block or later runs in one pass, which writes the
# prefix's state into another block. In decoding vLLM copies a state at each border: for 128, 1 % of what steps read.
STATE_TOKENS = 128


class Page(nn.Module, MambaBase):
    """To vLLM a layer with a state of fixed size, one page for each sequence.

    Args:
        size: of a page in bytes, without padding.
        in_block: how many vLLM made a block of its attention as large as, see `pages_in_block`.
    """

    def __init__(self, prefix: str, size: int, in_block: int) -> None:
        super().__init__()
        self.prefix, self.size, self.in_block = prefix, size, in_block
        self.kv_cache = (torch.empty(0),)

    @property
    def kv_cache(self) -> Any:
        """A sequence with the memory of all pages. vLLM sets it, for a time also to memory that it frees again."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, memory: Any) -> None:
        self._kv_cache, self.views = memory, None

    @property
    def mamba_type(self) -> Any:
        return MambaAttentionBackendEnum["LOLCATS"]  # see `register`

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """With the padding behind the state. An exact head's keys lie there if the page is one of keys: where a prefix
        ends inside a page, vLLM copies as much of it as the first layer with that memory, maybe this one, names.
        """
        cache, config = vllm_config.cache_config, vllm_config.model_config.hf_config
        inside = steps_in_pages(vllm_config) and not any(is_bounded(config, layer) for layer in config.layer_heads)
        if inside and cache.prefix_match_unit == PREFIX_UNIT:
            cache.mamba_block_size = min(cache.mamba_block_size, STATE_TOKENS)
        spec = super().get_kv_cache_spec(vllm_config)
        inner = {"num_prefill_checkpoint_blocks": int(inside), "prefill_checkpoint_alignment": 1}
        size = self.size if spec.page_size_padded is None else spec.page_size_padded // self.in_block
        return replace(spec, shapes=((size,),), page_size_padded=None, **inner)


class PagedHybridAttention(nn.Module):
    """Takes the place of vLLM's `Attention` in a layer: after projections, norms and rotary embedding.

    Under tensor parallelism it holds the feature maps, window factors and states of its rank's heads.
    """

    kernels: dict[str, Any] | None
    heads: Tensor | None  # the linear KV heads, where any layer has exact ones
    exact_heads: Tensor

    def __init__(self, config: LolcatsConfig, layer: LayerHeads, softmax: Attention) -> None:
        vllm_config, ranks = get_current_vllm_config(), get_tensor_model_parallel_world_size()
        dtype, in_block = vllm_config.model_config.dtype, pages_in_block(vllm_config)
        size, _ = model_pages(config, dtype, ranks)
        super().__init__()
        self.prefix, self.has_sink = softmax.layer_name, softmax.has_sink
        self.impl = softmax.impl  # its scale, softcap and sinks, whose weights are loaded later
        self.layer, own = layer, heads_of_rank(layer, get_tensor_model_parallel_rank(), ranks)
        self.parts, self.head_dim = state_parts(config, own, dtype), own.head_dim
        self.ring = ring_of(config, own, dtype)
        self.state_pages, self.state_bytes = states_of(config, own, dtype)
        names = [f"{self.prefix}.page_{i}" for i in range(layer_pages(config, own, dtype, size))]
        self.pages: Any = nn.ModuleList(Page(name, size, in_block) for name in names)
        self.linear_attention: Any = None
        if not own.is_softmax:
            sizes = own.num_heads, own.num_kv_heads, own.head_dim
            self.linear_attention = HybridAttention(config.attention, *sizes, exact=own.exact)
            for parameter in self.linear_attention.parameters():
                parameter.weight_loader = self._load  # how vLLM finds it
        self.kernels = None
        self.steps_in_pages = own.is_softmax or self.linear_attention.has_step_kernel(dtype)
        self.exact = ExactHeads(softmax, own.exact) if own.exact and self.ring is None else None
        self.side = aux_stream()  # None on a CPU
        mixed = config.has_exact_heads and not own.is_softmax  # one form: kernels are compiled once
        linear = torch.tensor(self.linear_attention.heads.linear) if mixed else None
        self.register_buffer("heads", linear, persistent=False)
        self.register_buffer("exact_heads", torch.tensor(own.exact, dtype=torch.int64), persistent=False)
        # After the exact heads: in the other order vLLM's prefix cache gave wrong answers in smaller units.
        context = vllm_config.compilation_config.static_forward_context
        context |= {self.prefix: self, **dict(zip(names, self.pages, strict=True))}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, H D] or [N, H, D], key and value with G heads, of N tokens; the output is [N, H D]."""
        query, key, value = query.flatten(1), key.flatten(1), value.flatten(1)
        inputs, outputs = [query, key, value], [torch.empty_like(query)]
        apart = None if self.exact is None or self.exact.in_place else self.exact
        if apart is not None:
            outputs.append(query.new_empty(query.shape[0], apart.whole.num_heads, self.head_dim))
        torch.ops.vllm.lolcats_attention(inputs, outputs, self.prefix)
        return outputs[0] if apart is None else apart.join(*outputs)

    def _load(self, parameter: Tensor, loaded: Tensor) -> None:
        """This rank's rows of a parameter, which has as many for each linear KV head."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        kv_heads, exact = self.layer.num_kv_heads, self.layer.exact
        first, part = divmod(rank * kv_heads, ranks)  # `part`: of a KV head that ranks share
        before = first - sum(head < first for head in exact)
        begin = (before * ranks + part) * (len(loaded) // (kv_heads - len(exact))) // ranks
        default_weight_loader(parameter, loaded[begin : begin + len(parameter)])

    def attend(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Write the layer's output for the tokens of the current pass, or that of exact heads apart, to be joined."""
        metadata = get_forward_context().attn_metadata
        q, k, v, y = (x.view(len(x), x.shape[1] // self.head_dim, self.head_dim) for x in (*inputs[:3], outputs[0]))
        if metadata is None:  # vLLM measures memory, or captures what lies between these layers
            if self.linear_attention is not None and self.kernels is None:
                self._try_prompts(Tokens(q, k, v, y, self.heads))
            torch._foreach_zero_(outputs)
            return
        exact_y = y if len(outputs) == 1 else outputs[1]
        if self.exact is not None and not self.pages:
            return self.exact.attend(inputs, exact_y)
        first = self.pages[0]
        batch = metadata[first.prefix]
        if first.views is None:
            first.views = self._find_pages()
        states, rings = first.views
        # Single tokens leave most of a GPU idle: both kinds of heads run at once. The caller holds inputs and outputs
        # until this stream has been told to wait for the other, so that nothing uses their memory before.
        side = self.side if self.exact is not None and batch.rest is None else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        if self.exact is not None:
            with torch.cuda.stream(side):
                self.exact.attend(inputs, exact_y)
        if self.linear_attention is not None:
            paged_attention(Tokens(q, k, v, y, self.heads), states, batch, **self._kernels())
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        if self.ring is not None:
            sinks = None
            if self.has_sink:
                sinks = self.impl.sinks.unflatten(0, (k.shape[1], -1))[self.exact_heads].flatten()
            ring_attention(self.ring, Tokens(q, k, v, y, self.exact_heads), rings, batch, self._scoring(sinks))

    def _scoring(self, sink_logits: Tensor | None) -> Scoring:
        return Scoring(sink_logits, self.impl.scale, self.impl.logits_soft_cap or None)

    def _find_pages(self) -> tuple[StatePages, Tensor]:
        """States, and the memory of rings: neighbours in a group of vLLM's, whose pages are equally far apart."""
        pages = [page.kv_cache[0] for page in self.pages]
        apart = pages[-1].storage_offset() - pages[0].storage_offset()
        strides = pages[0].stride(0), apart // max(len(pages) - 1, 1), 1
        memory_NPC = pages[0].as_strided((len(pages[0]), len(pages), pages[0].shape[1]), strides)
        states = memory_NPC[:, : self.state_pages, : self.state_bytes]
        if self.state_pages == 1:  # maybe of several heads
            states = states[:, 0].unflatten(1, (len(self.linear_attention.heads.linear), -1))
        return StatePages(self.parts, states), memory_NPC[:, self.state_pages :]

    def _scratch(self, device: torch.device) -> StatePages:
        """Two pages, of which one is used: a single page has other strides than vLLM's, and kernels depend on these."""
        nbytes, heads = -(-self.pages[0].size // 4096) * 4096, len(self.linear_attention.heads.linear)
        memory_GNC = torch.zeros(heads, 2, nbytes, dtype=torch.uint8, device=device)
        return StatePages(self.parts, memory_GNC.transpose(0, 1))

    def _try_prompts(self, prompt: Tokens) -> None:
        """Prompts, and the rest of one in two pieces: kernels are compiled before any comes."""
        pages = self._scratch(prompt.q_NHD.device)
        page_2B = torch.zeros(2, 2, dtype=torch.int32, device=prompt.q_NHD.device)
        most, few = len(prompt.q_NHD), min(len(prompt.q_NHD), 16)
        for begin, seen in (([0, most], [0]), ([0, few], [0]), ([0, 1, few], [2048, 2049])):
            begin_B, position_B = page_2B.new_tensor(begin), page_2B.new_tensor(seen, dtype=torch.int64)
            batch = PagedBatch(begin, seen, page_2B.unbind(), position_B, begin_B, steps=0, cut=range(len(seen) - 1))
            paged_attention(prompt, pages, batch, **self._kernels())

    @torch.no_grad()
    def _kernels(self) -> dict[str, Any]:
        """For `paged_attention`. Made at the first call, when weights are loaded: they do not change any more."""
        if self.kernels is None:
            sinks = self.linear_attention.heads.take_linear(self.impl.sinks, 0) if self.has_sink else None
            params = self.linear_attention.params(self._scoring(sinks))
            own: Any = {"config": self.linear_attention.config, "params": params}
            self.kernels = {"attend": partial(hybrid_attention, **own)}
            if self.steps_in_pages:
                from lolcats.ops.hybrid_attention.kernels.paged import PagedLayer  # imports Triton

                self.kernels["kernels"] = partial(PagedLayer, **own)
        return self.kernels


def _lolcats_attention(inputs: list[Tensor], outputs: list[Tensor], layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].attend(inputs, outputs)


direct_register_custom_op("lolcats_attention", _lolcats_attention, mutates_args=["outputs"], fake_impl=lambda *_: None)

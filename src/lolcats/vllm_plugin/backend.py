"""Which sequences a vLLM batch holds and where their states are."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointBuilder
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec

from lolcats.ops.hybrid_attention.pages import PagedBatch


class HybridBackend(LinearAttentionBackend):
    """vLLM's linear attention with our description of a batch."""

    @staticmethod
    def get_builder_cls() -> type[HybridMetadataBuilder]:
        return HybridMetadataBuilder


class HybridMetadataBuilder(AttentionMetadataBuilder[Any]):
    """What layers need of a pass; vLLM puts sequences that generate first. Full CUDA graphs read its own tensors."""

    kv_cache_spec: MambaSpec
    reorder_batch_threshold: int = 1
    supports_update_block_table = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in the base class
        super().__init__(*args, **kwargs)
        self.steps_in_pages = steps_in_pages(self.vllm_config)
        largest = self.vllm_config.scheduler_config.max_num_batched_tokens  # no fewer than sequences
        self.inner_states = MambaPrefillCheckpointBuilder(self.vllm_config, self.kv_cache_spec)
        self.page_B1 = torch.zeros(largest, 1, dtype=torch.int32, device=self.device)
        if self.device.type == "cuda":  # here the second model runner puts the pages, of all groups by one kernel
            self.mamba_aligned_state_indices: Tensor | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return single if steps_in_pages(vllm_config) else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """vLLM's description of a batch, in ours. Nothing waits for the device.

        With prefix caching vLLM has copied the state of the shared prefix into the sequence's own page before. It may
        want the state inside a prompt's last pass, in a page of its own: there the sequence is cut in two.
        """
        common, spec, mode = common_attn_metadata, self.kv_cache_spec, self.vllm_config.cache_config.mamba_cache_mode
        begin, begin_B, position_B = common.query_start_loc_cpu.tolist(), common.query_start_loc, common.positions
        # Sequences without tokens fill a CUDA graph up; they are last, and the page of each is 0.
        real, inner, shared, cuts = begin.index(begin[-1]), None, dict[Any, Any](), list[int]()
        begin = begin[: real + 1]
        steps = bisect_right(range(1, real + 1), 0, key=lambda row: begin[row] - row) if self.steps_in_pages else 0
        seen = [0] * steps  # nobody reads it of steps; their positions are those of the tokens, in vLLM's own tensor
        if steps < real:
            # The bound is exact without speculative decoding, which the model refuses.
            ends, begin_B = common.seq_lens_cpu_upper_bound.tolist(), begin_B[: real + 1]
            seen += [ends[row] - begin[row + 1] + begin[row] for row in range(steps, real)]
            if inner := self.inner_states.build(common, list(range(steps, real))):
                pieces = [(row, 0, row) for row in range(steps)]  # row, first token, place among all pages
                for row, cut in enumerate(inner.offsets or (), steps):
                    pieces += [(row, 0, row + real - steps)] * (cut > 0) + [(row, cut, row)]
                begin = [*(begin[row] + first for row, first, _ in pieces), begin[real]]
                seen = [seen[row] + first for row, first, _ in pieces]
                cuts = [number for number, (_, _, place) in enumerate(pieces) if place >= real]
                row_B, first_B, written_B = async_tensor_h2d([*zip(*pieces, strict=True)], self.device).unbind()
                begin_B = torch.cat([begin_B[row_B] + first_B, begin_B[-1:]])
            position_B = position_B[begin_B[:-1]]

        def batch_of(builder: HybridMetadataBuilder, table: Tensor) -> PagedBatch:
            """With a group's pages, in memory that stays the same: of sequences without tokens, too."""
            if (page_B1 := getattr(builder, "mamba_aligned_state_indices", None)) is None:
                page_B1 = builder.page_B1[: len(table)]
                page_B1.copy_(mamba_get_block_table_tensor(table, common.seq_lens, spec, mode)[:, :1])
            pages = page_B1[:, 0]
            if inner is None:
                return PagedBatch(begin, seen, (pages, pages), position_B, begin_B, steps, shared)
            pages = torch.cat([pages[:real], inner.regather_state_indices(table).state_indices])
            return PagedBatch(begin, seen, (pages[row_B], pages[written_B]), position_B, begin_B, steps, shared, cuts)

        batch: Any = batch_of(self, common.block_table_tensor)
        batch.of = batch_of
        return batch

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> PagedBatch:
        """What `build` would give, of what it gave to the builder of another group of states."""
        return metadata.of(self, blk_table)


def steps_in_pages(vllm_config: VllmConfig) -> bool:
    """Whether the kernel for single tokens takes all layers, and writes their states where they lie."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return all(layer.steps_in_pages for layer in layers if hasattr(layer, "steps_in_pages"))

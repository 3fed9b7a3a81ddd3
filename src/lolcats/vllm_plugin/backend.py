"""Which sequences a vLLM batch holds and where their states are."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec

from lolcats.ops.hybrid_attention.pages import PagedBatch


class HybridBackend(LinearAttentionBackend):
    """vLLM's linear attention with our description of a batch."""

    @staticmethod
    def get_name() -> str:
        return "LOLCATS"

    @staticmethod
    def get_builder_cls() -> type[HybridMetadataBuilder]:
        return HybridMetadataBuilder


class HybridMetadataBuilder(AttentionMetadataBuilder[PagedBatch]):
    """What layers need of a pass; vLLM puts sequences that generate first. Full CUDA graphs read its own tensors."""

    kv_cache_spec: MambaSpec
    reorder_batch_threshold: int = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in the base class
        super().__init__(*args, **kwargs)
        self.steps_in_pages = steps_in_pages(self.vllm_config)
        largest = max(
            self.vllm_config.scheduler_config.max_num_seqs,
            self.vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self.page_B = torch.full((largest,), -1, dtype=torch.int32, device=self.device)
        self.position_B = torch.zeros(largest, dtype=torch.int64, device=self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return single if steps_in_pages(vllm_config) else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedBatch:
        """vLLM's description of a batch, in ours. Nothing waits for the device.

        With prefix caching vLLM has copied the state of the shared prefix into the sequence's own page before.
        """
        common = common_attn_metadata
        pages = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        begin = common.query_start_loc_cpu
        lengths = begin.diff()
        # Sequences without tokens fill a CUDA graph up; they are last, and have no pages.
        real = int((lengths > 0).sum())
        self.page_B[:real] = pages[:real, 0]
        self.page_B[real:] = -1
        self.position_B[:real] = common.compute_num_computed_tokens()[:real]
        steps = int((lengths == 1).long().cumprod(0).sum()) if self.steps_in_pages else 0
        seen = [0] * real
        if steps < real:
            ends = common.seq_lens_cpu_upper_bound  # exact without speculative decoding, which the model refuses
            seen = ((common.seq_lens.cpu() if ends is None else ends)[:real] - lengths[:real]).tolist()
        return PagedBatch(begin[: real + 1].tolist(), seen, self.page_B, self.position_B, common.query_start_loc, steps)


def steps_in_pages(vllm_config: VllmConfig) -> bool:
    """Whether the kernel for single tokens takes all layers, and writes their states where they lie."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return all(layer.steps_in_pages for layer in layers if hasattr(layer, "steps_in_pages"))

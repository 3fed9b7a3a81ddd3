"""Which sequences a vLLM batch holds and where their states are."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointBuilder
from vllm.utils.torch_utils import async_tensor_h2d
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
        largest = self.vllm_config.scheduler_config.max_num_batched_tokens  # no fewer than sequences, cut or not
        self.inner_states = MambaPrefillCheckpointBuilder(self.vllm_config, self.kv_cache_spec)
        self.page_2B = torch.full((2, largest), -1, dtype=torch.int32, device=self.device)
        self.position_B = torch.zeros(largest, dtype=torch.int64, device=self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return single if steps_in_pages(vllm_config) else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedBatch:
        """vLLM's description of a batch, in ours. Nothing waits for the device.

        With prefix caching vLLM has copied the state of the shared prefix into the sequence's own page before. It may
        want the state inside a prompt's last pass, in a page of its own: there the sequence is cut in two.
        """
        common = common_attn_metadata
        pages = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        lengths = common.query_start_loc_cpu.diff()
        # Sequences without tokens fill a CUDA graph up; they are last, and have no pages.
        real = int((lengths > 0).sum())
        begin, begin_B = common.query_start_loc_cpu[: real + 1], common.query_start_loc[: real + 1]
        page_2B, position_B = pages[:real, 0].expand(2, -1), common.compute_num_computed_tokens()[:real]
        steps = int((lengths == 1).long().cumprod(0).sum()) if self.steps_in_pages else 0
        # The bound is exact without speculative decoding, which the model refuses.
        seen_B = common.seq_lens_cpu_upper_bound[:real] - lengths[:real]
        if steps < real and (inner := self.inner_states.build(common, list(range(steps, real)))):
            cut_N = torch.tensor([0] * steps + list(inner.offsets or ()))
            row_B = torch.arange(real).repeat_interleave(1 + (cut_N > 0))
            first_B = torch.where(row_B.diff(prepend=row_B.new_tensor([-1])) == 0, cut_N[row_B], 0)
            written_B = torch.where(first_B.roll(-1) > 0, row_B + real - steps, row_B)
            begin, seen_B = torch.cat([begin[row_B] + first_B, begin[real:]]), seen_B[row_B] + first_B
            tables = torch.stack([row_B, first_B, written_B])
            row_B, first_B, written_B = async_tensor_h2d(tables, self.device).unbind()
            begin_B = torch.cat([begin_B[row_B] + first_B, begin_B[real:]])
            page_2B = torch.cat([pages[:real, 0], inner.state_indices])[torch.stack([row_B, written_B])]
            real, position_B = len(row_B), position_B[row_B] + first_B
        self.page_2B[:, :real] = page_2B
        self.page_2B[:, real:] = -1
        self.position_B[:real] = position_B
        return PagedBatch(begin.tolist(), seen_B.tolist(), self.page_2B, self.position_B, begin_B, steps)


def steps_in_pages(vllm_config: VllmConfig) -> bool:
    """Whether the kernel for single tokens takes all layers, and writes their states where they lie."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return all(layer.steps_in_pages for layer in layers if hasattr(layer, "steps_in_pages"))

"""Which sequences a vLLM batch holds and where their states are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass
class HybridMetadata:
    """One forward pass, the same for all linearized layers."""

    batch: PagedBatch


class HybridMetadataBuilder(AttentionMetadataBuilder[HybridMetadata]):
    """Makes the metadata of a pass. vLLM puts sequences that generate, with one token each, first."""

    kv_cache_spec: MambaSpec
    reorder_batch_threshold: int = 1
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in the base class
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HybridMetadata:
        """vLLM's description of a batch, in ours.

        With prefix caching vLLM has copied the state of the shared prefix into the sequence's own page before.
        """
        common = common_attn_metadata
        pages = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        ends = common.seq_lens_cpu_upper_bound  # exact without speculative decoding, which the model refuses
        begin = common.query_start_loc_cpu
        seen = (common.seq_lens.cpu() if ends is None else ends) - begin.diff()
        return HybridMetadata(
            PagedBatch(begin.tolist(), seen.tolist(), pages[:, 0], common.compute_num_computed_tokens())
        )

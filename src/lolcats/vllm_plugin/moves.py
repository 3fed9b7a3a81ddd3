"""Where vLLM's second model runner copies states from page to page."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState


class StateMoves(MambaHybridModelState):
    """vLLM's, without its search on the device, before and behind each pass, for states that go on in another page.

    It has 16 programs for each page of each sequence. Without speculative decoding the host knows where a block ends.
    """

    def preprocess_state(self, input_batch: Any, block_tables: Any, kv_cache_config: Any, *_: Any) -> None:
        if not self._align_mode:  # each sequence stays in its page
            return
        size = self._get_mamba_group_info(kv_cache_config)[1].block_size
        last_B = input_batch.num_computed_tokens_np - 1
        from_B, to_B = last_B // size, (last_B + input_batch.num_scheduled_tokens) // size
        if len(rows := np.flatnonzero(from_B != to_B)):
            moves = np.stack([input_batch.idx_mapping_np[rows], from_B[rows], to_B[rows]])
            slot, source, target = async_tensor_h2d(moves, self.device).unbind()
            self._mamba_src_col_gpu[slot], self._mamba_state_idx_gpu[slot] = source.int(), target.int()
            columns = self._mamba_state_idx_gpu, self._mamba_src_col_gpu, self._mamba_src_off_gpu
            self._mamba_ctx.run_fused_precopy(len(rows), *columns, slot)

    def postprocess_state(self, *_: Any) -> None:
        pass

"""Which states vLLM's second model runner copies, by the host's numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

SIZE = 128  # of a block
# Request, tokens before, tokens of the pass; blocks of the states before and behind it, where they differ.
ROWS = [
    (5, 0, 1, (-1, 0)),
    (2, 127, 1, None),
    (0, 128, 1, (0, 1)),
    (7, 129, 1, None),
    (3, 100, 500, (0, 4)),
    (1, 256, 128, (1, 2)),
    (4, 257, 127, None),
]


def test_states_move_where_a_pass_ends_in_another_block():
    pytest.importorskip("vllm.v1.worker.gpu.model_states.mamba_hybrid", exc_type=ImportError)
    from lolcats.vllm_plugin.moves import StateMoves

    moved = {}

    def copy(count, to, source, offset, slots):
        assert count == len(slots)
        assert not offset.any()
        moved.update({slot: (int(source[slot]), int(to[slot])) for slot in slots.tolist()})

    state = object.__new__(StateMoves)
    state.device, state._align_mode = torch.device("cpu"), True
    state._mamba_ctx = SimpleNamespace(run_fused_precopy=copy)
    state._get_mamba_group_info = lambda config: ([], SimpleNamespace(block_size=SIZE))
    columns = [torch.full((8,), 99, dtype=torch.int32) for _ in range(2)]
    state._mamba_state_idx_gpu, state._mamba_src_col_gpu = columns
    state._mamba_src_off_gpu = torch.zeros(8, dtype=torch.int32)
    slot, before, new = np.array([row[:3] for row in ROWS]).T
    batch = {"num_computed_tokens_np": before, "num_scheduled_tokens": new, "idx_mapping_np": slot}
    state.preprocess_state(SimpleNamespace(**batch), (), None, None)
    assert moved == {row[0]: row[3] for row in ROWS if row[3]}

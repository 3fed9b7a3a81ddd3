"""Effective sequence length: how far back a model's softmax attention looks in a training sequence.

arXiv:2410.10254, appendix "Sample Lengths". For a query at position i it is the expected distance to the keys,
sum_j (i - j) w_ij with the softmax weights w; of a sequence, the sum over its queries, averaged over heads and
layers. With values (1, j) in the place of v, attention itself computes the two sums that this needs, so that no
T x T matrix is built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lolcats.data.packed import PackedDataset
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import batches_of
from lolcats.modeling.attention import AttentionCall, Observed
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.softmax import softmax_attention


@torch.no_grad()
def sequence_lengths(model: LolcatsForCausalLM, input_ids_BT: Tensor) -> Tensor:
    """Effective sequence length of each sequence under the base model's softmax attention: [B] float32, in tokens."""
    found: list[Tensor] = []
    batch, tokens = input_ids_BT.shape
    position_T = torch.arange(tokens, device=input_ids_BT.device, dtype=torch.float32)
    # Sink logits take weight without being keys, so that the weights' sum is not always 1.
    values_T8 = torch.zeros(tokens, 8, device=input_ids_BT.device)  # 8 columns: a width that every kernel takes
    values_T8[:, 0], values_T8[:, 1] = 1.0, position_T

    def observe(seen: Observed) -> None:
        values = values_T8.expand(batch, seen.k.shape[1], -1, -1)
        sums_BHT8 = softmax_attention(seen.q.float(), seen.k.float(), values, seen.scoring, seen.visible)
        found.append((position_T * sums_BHT8[..., 0] - sums_BHT8[..., 1]).sum(-1).mean(1))

    call = AttentionCall(mode="softmax", observe=observe)
    model(input_ids=input_ids_BT, use_cache=False, logits_to_keep=1, attention_call=call)
    return torch.stack(found).mean(0)


def effective_lengths(model: Any, dataset: PackedDataset, *, batch_size: int) -> dict[str, Any]:
    """Mean, standard deviation and histogram (counts between edges) of all sequences, as plain numbers."""
    if not isinstance(model, LolcatsForCausalLM):
        raise UserError(
            f"{type(model).__name__} has no softmax attention that goes through transformers' attention interface, so"
            " that effective sequence lengths cannot be measured"
        )
    batches = (dataset.batch(rows)["input_ids"].to(model.device) for rows in batches_of(dataset, batch_size))
    lengths_N = np.concatenate([sequence_lengths(model, batch).cpu().numpy() for batch in batches])
    counts, edges = np.histogram(lengths_N, bins=40)
    return {
        "sequences": len(lengths_N),
        "mean": float(np.mean(lengths_N)),
        "std": float(np.std(lengths_N)),
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }

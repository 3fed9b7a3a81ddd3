"""What each layer of a linearized model does, next to its own softmax attention: written as `analysis.json`.

All layers read the hidden states of the model with softmax attention, as in attention transfer: a difference is then
one of that layer, not of its inputs. docs/evaluation.md says what the keys are.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lolcats.config import DataSection
from lolcats.data import PackedDataset, build_evaluation_dataset
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model, with_begin_token
from lolcats.evaluation.perplexity import batches_of
from lolcats.modeling.attention import AttentionCall, Observed
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops import attention_weights
from lolcats.provenance import provenance
from lolcats.report import ANALYSIS_FILE, without_paths, write_text


def analyse(
    folder: str | Path,
    data: DataSection,
    *,
    dtype: str = "auto",
    device: str = "auto",
    batch_size: int = 1,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure everything on the linearized model in `folder` and write `analysis.json` there.

    Args:
        data: text that was not trained on; all rows, or the first `validation_sequences` packed sequences. If it
            does not set `begin_token`, that is as the folder was trained.
        batch_size: sequences at a time; attention weights take batch * heads * T * T numbers.
        report: receives sentences on what is being done.

    Returns:
        What was written; `docs/evaluation.md` lists the keys.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the output folder of `lolcats linearize`")
    model, tokenizer = load_model(folder, dtype=dtype, device=device)
    if not isinstance(model, LolcatsForCausalLM):
        raise UserError(f"{folder} is not a linearized model; give the output folder of `lolcats linearize`")
    dataset = build_evaluation_dataset(with_begin_token(data, folder, tokenizer), tokenizer)
    report(f"{len(model.config.linear_layers)} layers, {len(dataset)} sequences")
    values = {
        "model": str(folder),
        "data": dataset.info,
        "attention": asdict(model.config.attention) | {"exact": model.config.exact_heads},
        **measure(model, dataset, batch_size=batch_size),
        "provenance": provenance(),
    }
    values = without_paths(values)
    write_text(folder / ANALYSIS_FILE, json.dumps(values, indent=1) + "\n")
    return values


@torch.no_grad()
def measure(model: LolcatsForCausalLM, dataset: PackedDataset, *, batch_size: int = 1) -> dict[str, Any]:
    """layers, and of their linear heads mse, mse_heads and linear_share, averaged over all sequences."""
    layers = sorted(index for index, _ in model.linear_layers())
    # Sums [H] by layer, and how many sequences or tokens they are of.
    errors, shares, counts = dict[int, Tensor](), dict[int, Tensor](), defaultdict[str, int](int)

    def add(sums: dict[int, Tensor], layer: int, value_H: Tensor) -> None:
        sums[layer] = sums.get(layer, 0) + value_H.double()

    def observe(seen: Observed) -> None:
        module, layer_idx, *tensors, scoring, _ = seen
        if module is None:
            return
        q, k, v, y_softmax = map(module.heads.take_linear, tensors)
        scoring = module.linear_scoring(scoring)
        error_BHTD = module(q, k, v, scoring)[0].float() - y_softmax.float()
        add(errors, layer_idx, error_BHTD.square().mean(dim=(2, 3)).sum(0))
        params = module.params(scoring)
        hybrid_BHTT, _ = attention_weights(q, k, module.config, params)(0, q.shape[2])
        position_T = torch.arange(q.shape[2], device=q.device)
        # Rows of the hybrid weights sum to 1, so a sum over the keys outside the window is the linear part's share.
        far_TT = (position_T < module.config.window_start(position_T)[:, None]) & (position_T >= module.config.sinks)
        add(shares, layer_idx, (hybrid_BHTT * far_TT).sum((0, 2, 3)))
        if layer_idx == layers[0]:
            counts["tokens"] += len(q) * q.shape[2]
            counts["sequences"] += len(q)

    call = AttentionCall(mode="softmax", observe=observe)
    for rows in batches_of(dataset, batch_size):
        batch = dataset.batch(rows)
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name != "labels"}
        model.get_decoder()(**inputs, use_cache=False, attention_call=call)

    error_heads = [(errors[layer] / counts["sequences"]).tolist() for layer in layers]
    share_heads = [(shares[layer] / counts["tokens"]).tolist() for layer in layers]
    return {
        "layers": layers,
        "mse": [sum(row) / len(row) for row in error_heads],
        "mse_heads": error_heads,
        "linear_share": {"share": [sum(row) / len(row) for row in share_heads], "share_heads": share_heads},
    }

"""Why a linearized model does not find a passkey: what its retrieving heads see of it.

    python benchmarks/retrieval_probe.py out/ --length 2048 --sparse-cache 128 --cache-by leverage --json probe.json

For the heads whose softmax attention puts most weight on the number (with the model's own projections, at the prompt's
last token): that weight, the first token's, and of hybrid attention the share of the linear part and the weight on the
number; the same two if a sparse cache held the number; the worst rank of the number's tokens among all by the error of
recall, which is the size that a cache chosen by it would need; and with --sparse-cache the part of the number's softmax
weight that lies on tokens which the cache does keep.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lolcats.evaluation.load import load_model
from lolcats.evaluation.passkey import passkey_samples
from lolcats.ops import hybrid_attention
from lolcats.ops.hybrid_attention.feature_maps import get_feature_map
from lolcats.ops.hybrid_attention.spec import DENOMINATOR_FLOOR
from lolcats.provenance import provenance

COLUMNS = (
    "softmax",
    "first token",
    "linear share",
    "number",
    "linear share, cached",
    "number, cached",
    "worst rank",
    "kept",
)


def positions(tokens: list[int], number: list[int]) -> Tensor:
    """Of all tokens of all occurrences of the number."""
    size = len(number)
    begins = [at for at in range(len(tokens) - size + 1) if tokens[at : at + size] == number]
    return torch.tensor([at + offset for at in begins for offset in range(size)])


def kept(module: nn.Module, k_GTD: Tensor, v_GTD: Tensor, number_N: Tensor, size: int, by: str) -> Tensor:
    """[G, N] bool: which tokens of the number are in a sparse cache when all tokens have been read."""
    spec = replace(module.spec, sparse_cache=size, cache_by=by)
    q_1HTD = k_GTD[None].repeat_interleave(len(module.params().gamma) // len(k_GTD), 1)  # what they are matters not
    _, state = hybrid_attention(q_1HTD, k_GTD[None], v_GTD[None], spec, module.params(), return_state=True)
    assert state is not None
    return (k_GTD[:, number_N, None] == state.cache_k[0, :, None]).all(-1).any(-1)


def probe_layer(
    module: nn.Module,
    q_HTD: Tensor,
    k_GTD: Tensor,
    v_GTD: Tensor,
    number_N: Tensor,
    sparse_cache: int = 0,
    cache_by: str = "recall",
) -> list[dict[str, Any]]:
    """A row per head, for the last query; "kept" is None without a sparse cache."""
    spec = module.spec
    heads, tokens, head_dim = q_HTD.shape
    kv_heads = len(k_GTD)
    start = int(spec.window_start(torch.tensor(tokens - 1)))
    sinks_S, window_W = torch.arange(spec.sinks), torch.arange(start, tokens)
    linear_J = torch.arange(spec.sinks, start)
    params = module.params()
    phi = get_feature_map(spec.feature_map)
    states = len(params.k_weight)
    k_STD, v_STD = (x.repeat_interleave(states // kv_heads, 0) for x in (k_GTD, v_GTD))
    phi_k_STF = phi(k_STD, params.k_weight, params.k_bias)
    phi_q_H1F = phi(q_HTD[:, -1:], params.q_weight, params.q_bias)
    linear_HT = (phi_q_H1F @ phi_k_STF.repeat_interleave(heads // states, 0).transpose(-1, -2))[:, 0]
    score_HT = (q_HTD[:, -1:] @ k_GTD.repeat_interleave(heads // kv_heads, 0).transpose(-1, -2))[:, 0] * head_dim**-0.5
    softmax_HT = score_HT.softmax(-1)

    def shares(cached: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.cat([sinks_S, window_W, cached])
        summed = linear_J[~torch.isin(linear_J, cached)]
        top_H1 = score_HT[:, exact].amax(-1, keepdim=True)
        gamma_H1 = spec.gamma_at(params.gamma[:, None], torch.tensor(tokens - 1))
        weight_HJ = gamma_H1 * (score_HT[:, exact] - top_H1).exp()
        linear_H = linear_HT[:, summed].sum(-1)
        total_H = weight_HJ.sum(-1) + linear_H
        seen_H = weight_HJ[:, len(exact) - len(cached) :].sum(-1) if len(cached) else linear_HT[:, number_N].sum(-1)
        return linear_H / total_H, seen_H / total_H

    (linear_H, number_H), (cached_linear_H, cached_number_H) = (
        shares(torch.tensor([], dtype=torch.long)),
        shares(number_N),
    )
    S_SFD = phi_k_STF[:, linear_J].transpose(-1, -2) @ v_STD[:, linear_J]
    z_SF = phi_k_STF[:, linear_J].sum(1)
    recalled_STD = phi_k_STF @ S_SFD / (phi_k_STF @ z_SF[..., None]).clamp_min(DENOMINATOR_FLOOR)
    error_GT = (recalled_STD - v_STD).square().sum(-1).unflatten(0, (kv_heads, -1)).sum(1)[:, :start]
    rank_GN = error_GT.argsort(-1, descending=True).argsort(-1)[:, number_N]
    number_HN = softmax_HT[:, number_N]
    kept_H: list[float | None] = [None] * heads
    if sparse_cache:
        kept_HN = kept(module, k_GTD, v_GTD, number_N, sparse_cache, cache_by).repeat_interleave(heads // kv_heads, 0)
        kept_H = ((number_HN * kept_HN).sum(-1) / number_HN.sum(-1)).tolist()
    return [
        {
            "head": head,
            "softmax": float(number_HN[head].sum()),
            "first token": float(softmax_HT[head, 0]),
            "linear share": float(linear_H[head]),
            "number": float(number_H[head]),
            "linear share, cached": float(cached_linear_H[head]),
            "number, cached": float(cached_number_H[head]),
            "worst rank": int(rank_GN[head // (heads // kv_heads)].max()),
            "kept": kept_H[head],
        }
        for head in range(heads)
    ]


@torch.no_grad()
def probe(model: Any, tokenizer: Any, length: int, tenth: int, top: int, **cache: Any) -> list[dict[str, Any]]:
    """The `top` heads by their softmax weight on the number, of a text with the number in one of its tenths."""
    passkey, _, sample = passkey_samples(tokenizer, length, 1)[tenth]
    tokens = tokenizer(sample.prompt)["input_ids"]
    number_N = positions(tokens, tokenizer(str(passkey), add_special_tokens=False)["input_ids"])
    rows: list[dict[str, Any]] = []

    def observe(module: nn.Module, layer_idx: int, **seen: Any) -> None:
        q, k, v = (seen[name][0].float() for name in "qkv")
        rows.extend({"layer": layer_idx, **row} for row in probe_layer(module, q, k, v, number_N, **cache))

    with model.attention_mode("softmax"), model.observe(observe):
        model.get_decoder()(torch.tensor([tokens], device=model.device), use_cache=False)
    return sorted(rows, key=lambda row: -row["softmax"])[:top]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", help="output folder of lolcats linearize, without a sparse cache, scores scaled as usual"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of the text")
    parser.add_argument("--tenth", type=int, default=4, choices=range(10), help="of the text, where the number stands")
    parser.add_argument("--top", type=int, default=10, help="heads shown")
    parser.add_argument("--sparse-cache", type=int, default=0, help="its size")
    parser.add_argument("--cache-by", default="recall", choices=["recall", "leverage"])
    parser.add_argument("--linear-length-cap", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = load_model(
        arguments.model, dtype="float32", device="cpu", linear_length_cap=arguments.linear_length_cap
    )
    cache = {"sparse_cache": arguments.sparse_cache, "cache_by": arguments.cache_by}
    rows = probe(model, tokenizer, arguments.length, arguments.tenth, arguments.top, **cache)
    table = Table(title=f"{arguments.model}: passkey in {arguments.length} tokens")
    for name in ("layer", "head", *COLUMNS):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in row))
    Console(width=140).print(table)
    if arguments.json:
        settings = {name: str(value) for name, value in vars(arguments).items()}
        report = {"rows": rows, "settings": settings, "provenance": provenance()}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

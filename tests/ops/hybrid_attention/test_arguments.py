"""Arguments that do not fit are refused with what was expected."""

from __future__ import annotations

import re

import pytest
import torch
from hybrid_cases import make_case

from lolcats.config.attention import AttentionConfig
from lolcats.ops import hybrid_attention

SPEC = AttentionConfig("terraced", 4)


def _options(case, **changes):
    arguments = {
        "q_BHTD": case.q,
        "k_BGTD": case.k,
        "v_BGTD": case.v,
        "config": case.spec,
        "params": case.params,
    }
    return arguments | changes


def _bad_arguments() -> dict[str, tuple[str, dict]]:
    """Name -> (message, changed arguments)."""
    case = make_case(SPEC, 6, batch=2, kv_heads=2, repeats=3)  # q [2, 6, 6, 8], k [2, 2, 6, 8], P = 4
    q, k, params = case.q, case.k, case.params
    one = case.rows([0])
    row = {"q_BHTD": one.q, "k_BGTD": one.k, "v_BGTD": one.v}  # a batch of one row
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    state = case.run(hybrid_attention, return_state=True)[1]
    other_state = make_case(AttentionConfig("terraced", 5), 6).run(hybrid_attention, return_state=True)[1]
    assert state is not None
    assert params.q_weight is not None
    assert params.k_weight is not None

    def keys(changed_k: torch.Tensor) -> dict:
        return {"k_BGTD": changed_k, "v_BGTD": changed_k}

    def weights(**changed: torch.Tensor | None) -> dict:
        return {"params": params._replace(**changed)}

    slots = "the state holds {} sequences and {} window slots; expected 2 and 8"
    return {
        "backend": ("backend='cuda': expected one of auto, reference, chunked", {"backend": "cuda"}),
        "q dims": (
            "expected q [B, H, T, D] and k, v [B, G, T, D] of one shape; got q [2, 6, 8]",
            {"q_BHTD": q[:, 0]},
        ),
        "k dims": ("k [2, 6, 8], v [2, 6, 8]", keys(k[:, 0])),
        "v shape": ("got q [2, 6, 6, 8], k [2, 2, 6, 8], v [2, 2, 6, 4]", {"v_BGTD": k[..., :4]}),
        "tokens": (
            "q [2, 6, 6, 8] and k [2, 2, 5, 8] differ in batch, tokens or head_dim",
            keys(k[:, :, :5]),
        ),
        "heads": ("5 query heads are not a multiple of 2 key/value heads", {"q_BHTD": q[:, :5]}),
        "gamma": ("gamma: expected [6] (one per query head), got [2]", weights(gamma=params.gamma[:2])),
        "no q_weight": (
            "feature_map='hedgehog' needs q_weight and k_weight; got None",
            weights(q_weight=None),
        ),
        "q_weight": ("q_weight: expected [6, 8, 4], got [2, 8, 4]", weights(q_weight=params.q_weight[:2])),
        "columns": (
            "q_weight: expected [6, 8, 3], got [6, 8, 4]",
            weights(k_weight=params.k_weight[..., :3]),
        ),
        "k_weight heads": (
            "k_weight: expected [2 or 6, 8, P], got [3, 8, 4]",
            weights(k_weight=params.k_weight[[0, 0, 1]]),
        ),
        "k_weight dim": (
            "k_weight: expected [2 or 6, 8, P], got [2, 7, 4]",
            weights(k_weight=params.k_weight[:, :7]),
        ),
        "borders of rows": ("cu_seqlens: expected a batch of one row", {"cu_seqlens": cu}),
        "borders shape": ("cu_seqlens: expected [sequences + 1]", row | {"cu_seqlens": cu[None]}),
        "borders type": ("int32 or int64, got [3], torch.float32", row | {"cu_seqlens": cu.float()}),
        "borders begin": ("up to 6 tokens at most; got [2, 6]", row | {"cu_seqlens": cu[1:]}),
        "borders end": ("up to 6 tokens at most; got [0, 4, 12]", row | {"cu_seqlens": 2 * cu}),
        "borders order": ("up to 6 tokens at most; got [0, 6, 2]", row | {"cu_seqlens": cu[[0, 2, 1]]}),
        "borders and state": (slots.format(1, 8), row | {"cu_seqlens": cu, "state": state.select(torch.tensor([0]))}),
        "state batch": (slots.format(1, 8), {"state": state.select(torch.tensor([0]))}),
        "state window": (slots.format(2, 10), {"state": other_state}),
    }


@pytest.mark.parametrize("name", list(_bad_arguments()))
def test_bad_arguments_say_what_was_expected(name: str) -> None:
    message, changes = _bad_arguments()[name]
    case = make_case(SPEC, 6, batch=2, kv_heads=2, repeats=3)
    with pytest.raises(ValueError, match=re.escape(message)):
        hybrid_attention(**_options(case, **changes))


def test_the_same_arguments_unchanged_are_accepted() -> None:
    case = make_case(SPEC, 6, batch=2, kv_heads=2, repeats=3)
    y, state = hybrid_attention(**_options(case))
    assert y.shape == (2, 6, 6, 8)
    assert state is None

"""Arguments that do not fit are refused with what was expected."""

import re
from dataclasses import replace

import pytest
import torch
from kit import make_case

# On any machine of the CPU: q [2, 6, 6, 8], k [2, 2, 6, 8], P = 4
CASE = make_case("terraced 4", 6, batch=2, heads=6, kv_heads=2, head_dim=8, columns=4).map(torch.Tensor.cpu)
ONE = CASE.with_qkv(lambda x: x[:1])
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
STATE = CASE.run("chunked", return_state=True)[1]
OTHER = replace(CASE, config=replace(CASE.config, window_size=5))
OTHER_STATE = OTHER.run("chunked", return_state=True)[1]


def keys(function):
    return replace(CASE, k=function(CASE.k), v=function(CASE.v))


def weight(name, index):
    return replace(CASE, params=CASE.params._replace(**{name: index and getattr(CASE.params, name)[index]}))


SLOTS = "the state holds {} sequences and {} window slots; expected 2 and 8"
FEWER = STATE.map(lambda x: x[:1])
ALL = slice(None)
BAD = {
    "backend": ("backend='cuda': expected one of auto, reference, chunked", CASE, {"backend": "cuda"}),
    "q dims": (
        "expected q [B, H, T, D] and k, v [B, G, T, D] of one shape; got q [2, 6, 8]", replace(CASE, q=CASE.q[:, 0])
    ),
    "k dims": ("k [2, 6, 8], v [2, 6, 8]", keys(lambda k: k[:, 0])),
    "v shape": ("got q [2, 6, 6, 8], k [2, 2, 6, 8], v [2, 2, 6, 4]", replace(CASE, v=CASE.v[..., :4])),
    "tokens": ("q [2, 6, 6, 8] and k [2, 2, 5, 8] differ in batch, tokens or head_dim", keys(lambda k: k[:, :, :5])),
    "heads": ("5 query heads are not a multiple of 2 key/value heads", replace(CASE, q=CASE.q[:, :5])),
    "window_factor": ("window_factor: expected [6] (one per query head), got [2]", weight("window_factor", slice(2))),
    "no q_weight": ("feature_map='hedgehog' needs q_weight and k_weight; got None", weight("q_weight", None)),
    "q_weight": ("q_weight: expected [6, 8, 4], got [2, 8, 4]", weight("q_weight", slice(2))),
    "columns": ("q_weight: expected [6, 8, 3], got [6, 8, 4]", weight("k_weight", (ALL, ALL, slice(3)))),
    "k_weight heads": ("k_weight: expected [2 or 6, 8, P], got [3, 8, 4]", weight("k_weight", [0, 0, 1])),
    "k_weight dim": ("k_weight: expected [2 or 6, 8, P], got [2, 7, 4]", weight("k_weight", (ALL, slice(7)))),
    "borders of rows": ("cu_seqlens: expected a batch of one row", CASE, {"cu_seqlens": CU}),
    "borders shape": ("cu_seqlens: expected [sequences + 1]", ONE, {"cu_seqlens": CU[None]}),
    "borders type": ("int32 or int64, got [3], torch.float32", ONE, {"cu_seqlens": CU.float()}),
    "borders begin": ("up to 6 tokens at most; got [2, 6]", ONE, {"cu_seqlens": CU[1:]}),
    "borders end": ("up to 6 tokens at most; got [0, 4, 12]", ONE, {"cu_seqlens": 2 * CU}),
    "borders order": ("up to 6 tokens at most; got [0, 6, 2]", ONE, {"cu_seqlens": CU[[0, 2, 1]]}),
    "borders and state": (SLOTS.format(1, 8), ONE, {"cu_seqlens": CU, "state": FEWER}),
    "state batch": (SLOTS.format(1, 8), CASE, {"state": FEWER}),
    "state window": (SLOTS.format(2, 10), CASE, {"state": OTHER_STATE}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_say_what_was_expected(name: str) -> None:
    message, case, *options = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        case.run(**{"backend": "auto"} | (options[0] if options else {}))


def test_the_same_arguments_unchanged_are_accepted() -> None:
    y, state = CASE.run("auto", state=STATE)
    assert y.shape == (2, 6, 6, 8)
    assert state is None

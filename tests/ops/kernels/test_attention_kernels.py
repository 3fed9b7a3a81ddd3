"""Outputs, states, every gradient and decoding of the Triton kernels against `reference` in float64.

One table of small cases, each of which meets parts of the kernels that the others do not, runs everywhere; the
products of settings, layouts, sizes and types run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from kernel_kit import (
    DEVICE,
    GPU,
    TOLERANCE,
    assert_near,
    borders,
    check,
    check_decoding,
    decode,
    errors,
    exact,
    late,
    layout,
    make_case,
    needs_gpu,
    results,
    state_after,
    triton_step,
)

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels.decode import programs_of_a_head

CONFIGS = {
    "terraced-64": AttentionConfig("terraced", 64),
    "terraced-64-sinks-1": AttentionConfig("terraced", 64, sinks=1),
    "terraced-16-sinks-3": AttentionConfig("terraced", 16, sinks=3),
    "terraced-48-three-blocks-t2r": AttentionConfig("terraced", 48, 3, feature_map="t2r"),
    "as-shipped": AttentionConfig("terraced", 128, sinks=1, linear_length_cap=150),
    "terraced-16-t2r-sinks-40": AttentionConfig("terraced", 16, sinks=40, feature_map="t2r"),
    "terraced-8-no-linear": AttentionConfig("terraced", 8, feature_map=None),
    "sliding-20-sinks-3": AttentionConfig("sliding", 20, sinks=3),
    "sliding-70-elu": AttentionConfig("sliding", 70, feature_map="elu"),
    "sliding-24-no-linear-sinks-5": AttentionConfig("sliding", 24, sinks=5, feature_map=None),
    "linear": AttentionConfig("sliding", 0),
    "linear-elu-sinks-2": AttentionConfig("sliding", 0, sinks=2, feature_map="elu"),
}
CAPPED = {
    "terraced-16-sinks-3": AttentionConfig("terraced", 16, sinks=3, linear_length_cap=9),
    "sliding-20": AttentionConfig("sliding", 20, linear_length_cap=30),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((64, 32), (80, 40), (96, 128), (128, 64), (256, 128))  # head_dim, columns


class Kind(NamedTuple):
    """Settings, a layout, and what else makes a case."""

    config: str
    layout: str
    before: tuple[int, ...] | None = None  # tokens that each sequence had
    sizes: dict[str, Any] = {}
    softcap: float | None = None


FEW = (
    Kind("terraced-64", "1"),
    Kind("terraced-64", "64"),
    Kind("terraced-64", "130", None, {"share": "query_head"}),
    Kind("as-shipped", "200", None, {"dtype": torch.bfloat16, "head_dim": 32, "columns": 16}),
    Kind("terraced-16-sinks-3", "66", None, {"heads": 6, "kv_heads": 2, "head_dim": 20, "columns": 10}),
    Kind("terraced-16-sinks-3", "borders"),
    Kind("sliding-20-sinks-3", "rows", (71, 20, 3), {"share": "query_head"}),
    Kind("sliding-70-elu", "100"),
    Kind("terraced-48-three-blocks-t2r", "100", (50,)),
    Kind("terraced-8-no-linear", "70"),
    Kind("terraced-16-sinks-3", "66", None, {"sink_logits": True, "heads": 4, "kv_heads": 2}),
    Kind("sliding-20-sinks-3", "borders", (71, 0, 20, 5, 79), {"sink_logits": True}, 2.0),
    Kind("terraced-8-no-linear", "70", None, {"sink_logits": True}, 0.7),
    Kind("linear", "70", None, {"sink_logits": True}, 5.0),
)
MORE = (
    Kind("terraced-64", "borders", (71, 0, 20, 5, 79)),
    Kind("linear-elu-sinks-2", "borders"),
    Kind("terraced-64", "130", None, {"sink_logits": True, "dtype": torch.bfloat16, "head_dim": 32, "columns": 16}),
    Kind("sliding-20-sinks-3", "rows", (71, 20, 3), {"dtype": torch.bfloat16, "head_dim": 32, "columns": 16}, 2.0),
)


def describe(value: Any) -> str | None:
    if isinstance(value, Kind):
        parts = [value.config, value.layout, *(["resumed"] if value.before else [])]
        parts += [name if x is True else str(x) for name, x in value.sizes.items()]
        return "-".join(parts + ([] if value.softcap is None else [f"softcap-{value.softcap}"]))
    return None


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)], ids=describe)
def test_outputs_states_and_gradients(kind):
    batch, tokens, options, padding = layout(kind.layout)
    case = make_case(CONFIGS[kind.config], tokens, batch=batch, **kind.sizes)
    options["softcap"] = kind.softcap
    if kind.before is not None:
        options["state"] = state_after(case, kind.before)
    check(case, wrong=case.with_nan_where(padding), **options)


LAYOUTS = ("1", "63", "64", "65", "borders", "rows")


@needs_gpu
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "200") for name in sorted(CONFIGS)]
    + [(name, how) for name in ("terraced-64-sinks-1", "sliding-20-sinks-3") for how in LAYOUTS],
)
def test_every_layout(name, how):
    share = ("kv_head", "query_head")[sorted(CONFIGS).index(name) % 2]
    batch, tokens, options, padding = layout(how)
    case = make_case(CONFIGS[name], tokens, batch=batch, heads=4, kv_heads=2, share=share)
    check(case, wrong=case.with_nan_where(padding), **options)
    before = {"rows": (71, 20, 3), "borders": (71, 0, 20, 5, 79)}.get(how)
    if before is not None:
        check(case, state=state_after(case, before), **options)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "columns"), SIZES)
@pytest.mark.parametrize("name", ["terraced-64", "terraced-64-sinks-1", "sliding-20-sinks-3", "linear"])
def test_every_size_and_type(name, head_dim, columns, dtype):
    if dtype == torch.float32 and head_dim > 128:
        pytest.skip("float32 rows this wide have no kernel")
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": head_dim, "columns": columns, "dtype": dtype}
    check(make_case(CONFIGS[name], 500, batch=2, **sizes), return_state=True)
    if name == "linear":
        return
    lengths = (1, 63, 64, 65, 0, 130, 3, 500, 1000)
    check(make_case(CONFIGS[name], sum(lengths), **sizes), cu_seqlens=borders(*lengths), return_state=True)


@needs_gpu
@pytest.mark.parametrize(
    ("head_dim", "columns", "dtype"),
    [(64, 32, torch.bfloat16), (256, 128, torch.bfloat16), (128, 64, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["sink-logits", "softcap"])
@pytest.mark.parametrize("name", ["terraced-64", "terraced-64-sinks-1", "sliding-20-sinks-3"])
def test_sink_logits_and_softcap_of_every_size(name, softcap, head_dim, columns, dtype):
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": head_dim, "columns": columns, "dtype": dtype}
    sizes["sink_logits"] = softcap is None
    check(make_case(CONFIGS[name], 500, batch=2, **sizes), softcap=softcap, return_state=True)
    lengths = (1, 63, 64, 65, 0, 130, 3, 500, 1000)
    packed = {"cu_seqlens": borders(*lengths), "return_state": True}
    check(make_case(CONFIGS[name], sum(lengths), **sizes), softcap=softcap, **packed)


@pytest.mark.parametrize("columns", [128])
def test_gradient_of_gamma(columns):
    """It sums dy . (v - y) over all rows and keys, of which little is left; with the rounding of y the error here
    would be 7.0e-3."""
    sizes = {"dtype": torch.bfloat16, "head_dim": 32, "columns": columns}
    check(make_case(CONFIGS["terraced-64-sinks-1"], 170, **sizes))


@pytest.mark.parametrize(("name", "how", "before", "softcap"), [
    pytest.param("terraced-16-sinks-3", "rows", (71, 20, 0), None, marks=pytest.mark.slow),
    ("sliding-20", "borders", (71, 0, 20, 5, 79), 2.0),
    ("sliding-20", "70", None, None),
])  # fmt: skip
def test_linear_length_cap(name, how, before, softcap):
    """Beyond it."""
    batch, tokens, options, padding = layout(how)
    case = make_case(CAPPED[name], tokens, batch=batch, sink_logits=softcap is not None)
    options |= {"state": None if before is None else state_after(case, before), "softcap": softcap}
    check(case, wrong=case.with_nan_where(padding), **options)


def test_a_linear_length_cap_that_no_token_passes():
    """The same numbers as without: the kernels do not get it."""
    case = make_case(AttentionConfig("terraced", 4, sinks=1, linear_length_cap=20), 20)
    without = results(case.with_config(linear_length_cap=0), "triton")
    for name, x in results(case, "triton").items():
        assert torch.equal(x, without[name]), name


@pytest.mark.parametrize("kind", [
    Kind("terraced-64", "borders"),
    Kind("sliding-20-sinks-3", "70"),
    Kind("terraced-8-no-linear", "70"),
    pytest.param(Kind("sliding-20-sinks-3", "borders", None, {"sink_logits": True}, 2.0), marks=pytest.mark.slow),
], ids=describe)  # fmt: skip
def test_output_mse(kind):
    """The error inside the kernels is that of the written outputs, and so are the gradients; padding is left out."""
    batch, tokens, options, padding = layout(kind.layout)
    options.pop("return_state", None)
    options["softcap"] = kind.softcap
    case = make_case(CONFIGS[kind.config], tokens, batch=batch, **kind.sizes)
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)
    expected = errors(exact(case), "reference", target.double(), **options)
    given = target.masked_fill(padding[:, None, :, None], float("nan"))
    assert_near(errors(case.with_nan_where(padding), "triton", given, **options), expected, torch.float32)


@needs_gpu
@pytest.mark.parametrize("name", ["terraced-64", "as-shipped", "sliding-20-sinks-3"])
def test_output_mse_as_trained(name):
    """A small model's heads in bfloat16."""
    sizes = {"heads": 9, "kv_heads": 3, "head_dim": 64, "columns": 32, "dtype": torch.bfloat16}
    case = make_case(CONFIGS[name], 1000, batch=2, **sizes)
    target = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(5)).to(case.q)
    assert_near(errors(case, "triton", target), errors(exact(case), "reference", target.double()), torch.bfloat16)


@torch.no_grad()
def test_without_autograd():
    """Nothing is saved, nothing else changes; rows in any memory layout."""
    case = make_case(CONFIGS["sliding-20-sinks-3"], 70)
    with torch.enable_grad():
        expected = results(case, "triton")["output"]
    assert torch.equal(case.run("triton")[0], expected)
    assert torch.equal(replace(case, q=case.q.contiguous(), v=case.v.contiguous()).run("triton")[0], expected)


# Decoding: single tokens from an empty state.

# Windows small enough that a few times their capacity is quick through the interpreter; all parts of the kernel.
STEPS = {
    "terraced-5-three-blocks": AttentionConfig("terraced", 5, 3),
    "terraced-4-t2r-sinks-10": AttentionConfig("terraced", 4, sinks=10, feature_map="t2r"),
    "terraced-4-sinks-2-cap-9": AttentionConfig("terraced", 4, sinks=2, linear_length_cap=9),
    "terraced-4-no-linear": AttentionConfig("terraced", 4, feature_map=None),
    "terraced-20-one-block-elu": AttentionConfig("terraced", 20, 1, feature_map="elu"),
    "sliding-1": AttentionConfig("sliding", 1),
    "sliding-7-sinks-3": AttentionConfig("sliding", 7, sinks=3),
    "sliding-4-cap-9": AttentionConfig("sliding", 4, linear_length_cap=9),
    "linear-elu-sinks-2": AttentionConfig("sliding", 0, sinks=2, feature_map="elu"),
}
LONG = {
    "terraced-64": AttentionConfig("terraced", 64),
    "terraced-48-three-blocks": AttentionConfig("terraced", 48, 3),
    "terraced-100-sinks-5": AttentionConfig("terraced", 100, sinks=5),
    "sliding-70-sinks-3": AttentionConfig("sliding", 70, sinks=3),
}


@pytest.mark.parametrize("name", sorted(STEPS))
def test_decoding(name):
    """Two sequences at different positions; every other one with a state per query head."""
    config = STEPS[name]
    tokens = (3 if GPU else 2) * min(max(config.capacity, 4), 10) + 4
    share = ("kv_head", "query_head")[sorted(STEPS).index(name) % 2]
    check_decoding(make_case(config, tokens, batch=2, share=share), mask=late(2, tokens))


@pytest.mark.parametrize(
    ("name", "tokens", "sizes"),
    [
        (
            "terraced-4-sinks-2-cap-9",
            14,
            {"heads": 6, "kv_heads": 2, "head_dim": 20, "columns": 10, "share": "query_head"},
        ),
        ("terraced-4-sinks-2-cap-9", 13, {"heads": 3, "kv_heads": 3}),
        ("terraced-4-sinks-2-cap-9", 13, {"head_dim": 48, "columns": 100}),  # S does not fit into one tile
        ("sliding-7-sinks-3", 9, {"head_dim": 48, "columns": 100}),
        ("terraced-5-three-blocks", 20, {"dtype": torch.bfloat16, "head_dim": 32, "columns": 16}),
        ("sliding-7-sinks-3", 12, {"dtype": torch.float16, "head_dim": 32, "columns": 16}),
    ],
)
def test_decoding_of_other_sizes(name, tokens, sizes):
    check_decoding(make_case(STEPS[name], tokens, **sizes))


@pytest.mark.parametrize("name", ["terraced-4-sinks-2-cap-9", "sliding-7-sinks-3"])
@pytest.mark.parametrize("programs", [1, 3])
def test_states_that_change_are_dealt_out(programs, name, monkeypatch):
    """Among fewer programs than there are, from sequences at different places, of which some are looked at together."""
    from triton import language as tl

    from lolcats.ops.hybrid_attention.kernels import decode, step_kernel

    monkeypatch.setattr(decode, "MOST_FOLDING", programs)
    if not GPU:  # where it is compiled in, and there are more sequences
        monkeypatch.setattr(step_kernel, "_SEQUENCES", tl.constexpr(2))
    batch, tokens = (1030, 14) if GPU else (5, 11)
    sizes = {"batch": batch, "heads": 2, "kv_heads": 1, "share": "query_head"}
    begin = torch.arange(batch, device=DEVICE)[:, None] % 5
    check_decoding(make_case(STEPS[name], tokens, **sizes), mask=torch.arange(tokens, device=DEVICE) >= begin)


@torch.no_grad()
@pytest.mark.parametrize("name", ["terraced-64", "terraced-100-sinks-5"])
def test_long_blocks_leave(name):
    """Two steps after a prompt: a block leaves in the second, in the first, in none."""
    capacity = LONG[name].capacity
    case = make_case(LONG[name], capacity + 2)
    expected, _ = exact(case).run("reference")
    for seen, leaves in ((capacity - 1, True), (capacity, True), (capacity - 3, False)):
        _, state = case.part(0, seen).run("reference", return_state=True)
        for at in (seen, seen + 1):
            y, state = triton_step(case.part(at, at + 1), state=state)
            assert_near({"y": y}, {"y": expected[:, :, at : at + 1]}, case.q.dtype)
        assert bool(state.z.any()) == leaves


@pytest.mark.parametrize("programs", [1, 264])
def test_columns_are_divided_or_not(programs, monkeypatch):
    """One program a head, or four; features of more sequences than a tile has."""
    from lolcats.ops.hybrid_attention.kernels import decode as module

    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", programs)
    tile, batch = (16, 20) if GPU else (4, 5)
    monkeypatch.setattr(module, "MOST_SEQUENCES", tile)
    assert programs_of_a_head(batch, 64) == (1 if programs == 1 else 4)
    sizes = {"batch": batch, "heads": 2, "kv_heads": 1, "head_dim": 64, "share": "query_head"}
    begun = torch.arange(10, device=DEVICE) >= torch.arange(batch, device=DEVICE)[:, None] % 4
    check_decoding(make_case(STEPS["sliding-7-sinks-3"], 10, **sizes), mask=begun)


@pytest.mark.parametrize("name", ["sliding-4-cap-9", "terraced-4-sinks-2-cap-9"])
def test_softcap_and_sink_logits(name):
    case = make_case(STEPS[name], 12)
    case.params = case.params._replace(sink_logits=torch.tensor([0.5, -1.0], device=DEVICE))
    check_decoding(case, softcap=0.7)


@needs_gpu
@pytest.mark.parametrize(
    ("name", "head_dim", "columns", "dtype", "share"),
    [(name, 64, 32, dtype, share) for name in LONG for dtype in DTYPES for share in ("kv_head", "query_head")]
    + [(name, *size, dtype, "kv_head") for name in ("terraced-64", "sliding-70-sinks-3") for size in SIZES[1:]
       for dtype in DTYPES],
)  # fmt: skip
def test_decoding_of_every_size_and_type(name, head_dim, columns, dtype, share):
    if dtype == torch.float32 and head_dim > 128:
        pytest.skip("float32 rows this wide have no kernel")
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "columns": columns, "share": share, "dtype": dtype}
    check_decoding(make_case(LONG[name], 330, batch=3, **sizes), mask=late(3, 330))


@needs_gpu
@pytest.mark.parametrize("name", ["terraced-64", "sliding-70-sinks-3"])
def test_large_batch(name):
    """More sequences than a tile of features has, and one program a head."""
    assert programs_of_a_head(300 * 8, 128) == 1
    case = make_case(LONG[name], 200, batch=300, heads=32, kv_heads=8, dtype=torch.bfloat16)
    check_decoding(case, mask=late(300, 200) | (torch.arange(300, device=DEVICE) > 40)[:, None])


@torch.no_grad()
@pytest.mark.parametrize("name", ["terraced-4-sinks-2-cap-9", "terraced-4-no-linear"])
def test_sequences_that_do_not_exist_keep_their_state(name):
    """Of two sequences that begin a block, one gets no token."""
    case = make_case(STEPS[name], 12, batch=2)
    _, state = decode(case)
    before = state.clone()
    state.position[1] = -1
    y, after = triton_step(case.part(0, 1), state=state)
    assert after is not None
    assert y[0].any()
    assert not y[1].any()
    assert after.position.tolist() == [13, -1]
    after.position[1] = 12
    for part, tensor in after.tensors().items():
        assert torch.equal(tensor[1], before.tensors()[part][1]), part


@torch.no_grad()
@pytest.mark.parametrize("name", ["sliding-4-cap-9", "terraced-4-sinks-2-cap-9"])
def test_in_place(name):
    """The state's own tensors change. Rows in any memory layout."""
    case = make_case(STEPS[name], 12)
    _, state = decode(case)
    other, now = state.clone(), case.part(0, 1)
    y, after = now.run("triton", state=other)
    assert after is not None
    strided = replace(now, q=now.q.contiguous(), k=now.k.expand(1, 1, 1, 16))
    y_strided, same = triton_step(strided, state=state)
    assert same is not None
    assert torch.equal(y, y_strided)
    for part, tensor in same.tensors().items():
        assert tensor.data_ptr() == state.tensors()[part].data_ptr(), part
        assert torch.equal(tensor, after.tensors()[part]), part


@torch.no_grad()
def test_empty_slots_are_not_read():
    """NaN in them changes nothing, NaN in a filled one does."""
    case = make_case(STEPS["terraced-20-one-block-elu"], 14)
    _, state = decode(case)
    poisoned = state.clone()
    poisoned.k[:, :, 14:], poisoned.v[:, :, 14:] = torch.nan, torch.nan
    expected, _ = triton_step(case.part(0, 1), state=state)
    assert torch.equal(triton_step(case.part(0, 1), state=poisoned.clone())[0], expected)
    poisoned.v[:, :, 13] = torch.nan
    assert triton_step(case.part(0, 1), state=poisoned)[0].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["terraced-5-three-blocks", "sliding-7-sinks-3"])
def test_does_not_drift(name):
    """Sums in float32 of bfloat16 activations: the error at the end is that of the start."""
    tokens = 4000 if GPU else 44
    case = make_case(STEPS[name], tokens, dtype=torch.bfloat16)
    case.v = (1.0 + case.v.float()).to(torch.bfloat16)  # with a mean, so that outputs do not shrink
    y, _ = decode(case)
    expected, _ = exact(case).run("chunked")
    error = ((y.double() - expected).square().mean((0, 1, 3)) / expected.square().mean((0, 1, 3))).sqrt()
    quarter = tokens // 4
    assert error[-quarter:].mean() <= 1.25 * error[quarter : 2 * quarter].mean()
    assert error.max() <= 3 * TOLERANCE[torch.bfloat16]


@needs_gpu
@pytest.mark.parametrize("name", ["terraced-5-three-blocks", "sliding-7-sinks-3"])
def test_cuda_graphs(name):
    """A captured step, replayed, is the step."""
    case = make_case(STEPS[name], 40, batch=3, dtype=torch.bfloat16)
    mask = late(3, 40)
    expected, after = decode(case, mask=mask)
    _, state = decode(case.part(0, 0 + 1), mask=torch.zeros_like(mask[:, :1]))
    inputs = replace(case.part(0, 1).map(torch.clone), params=case.params)
    position = state.position.clone()
    with torch.no_grad():
        triton_step(inputs, state=state.clone())  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = triton_step(inputs, state=state)
    outputs = []
    for t in range(40):
        for mine, new in zip((inputs.q, inputs.k, inputs.v), (case.q, case.k, case.v), strict=True):
            mine.copy_(new[:, :, t : t + 1])
        state.position.copy_(torch.where(mask[:, t], position, -1))
        graph.replay()
        position += mask[:, t]
        outputs.append(y.clone())
    state.position.copy_(position)
    assert torch.equal(torch.cat(outputs, dim=2), expected)
    for part, tensor in state.tensors().items():
        assert torch.equal(tensor, after.tensors()[part]), part

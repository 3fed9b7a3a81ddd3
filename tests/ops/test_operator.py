"""The operator: the reference against softmax attention, every backend against the reference.

One matrix of outputs, states and gradients, one of decoding. Rows of the kernels that are few and small run everywhere,
the products of settings, sizes and types on a GPU.
"""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise, product

import pytest
import torch
from kit import (
    CONFIGS,
    DEVICE,
    GPU,
    TOLERANCE,
    Row,
    alone,
    assert_near,
    check,
    check_decoding,
    chunked_step,
    config_of,
    decode,
    exact,
    late,
    make_case,
    needs_triton,
    packed,
    random_pieces,
    results,
    triton_step,
    unpacked,
    varied,
)

from lolcats.modeling.softmax import softmax_attention
from lolcats.ops import Scoring
from lolcats.ops.eight_bits import pack, unpack
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS

chunked_module = import_module("lolcats.ops.hybrid_attention.chunked")
BF16 = {"dtype": torch.bfloat16, "head_dim": 32, "columns": 16}
SINKS = {"sink_logits": True}
FIVE = (1, 63, 0, 66, 2)  # lengths around a chunk's, one without a token, and fewer than sinks
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((64, 32), (80, 40), (96, 128), (128, 64), (256, 128))  # head_dim, columns


def every_size(configs: tuple[str, ...], sizes: tuple[tuple[int, int], ...] = SIZES) -> list[tuple[str, dict]]:
    """(config, head_dim and more) of all types that have a kernel."""
    found = [(c, {"head_dim": d, "columns": p, "dtype": dtype}) for c, (d, p), dtype in product(configs, sizes, DTYPES)]
    return [(c, x) for c, x in found if x["dtype"] != torch.float32 or x["head_dim"] <= 128]


# --- limits of the equation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_window_for_all_is_softmax_attention(backend):
    """A window that holds the whole sequence, up to its last token."""
    wide = [("sliding 40", 40), ("sliding 90 sinks=3", 70), ("terraced 20", 40), ("terraced 8 blocks=3 sinks=1", 24)]
    wide += [("terraced 64 map=None", 100), ("sliding 1 sinks=30", 31)]
    for (config, tokens), options, sinks in product(wide, ({}, {"softcap": 2.0, "scale": 0.7}), (False, True)):
        case = make_case(config, tokens, heads=6, kv_heads=2, dtype=torch.float64, sink_logits=sinks)
        expected = softmax_attention(case.q, case.k, case.v, Scoring(case.params.sink_logits, **options))
        assert_near({"y": case.run(backend, **options)[0]}, {"y": expected}, torch.float64)


# --- outputs, states and gradients -------------------------------------------------------------------------------

LAYOUTS = [
    (1, None), (63, None), (150, None), (1, (40, 9, 0)), (150, (90, 7, 0)),
    ((90, 0, 1, 63, 65), None), ((30, 1, 0, 50), (5, 0, 61, 20)),
]  # fmt: skip
CHUNKED = [
    Row(config, tokens, before, varied(turn), 1.5 if turn % 7 == 6 else None)
    for turn, (config, (tokens, before)) in enumerate(product(CONFIGS, LAYOUTS))
]
# ReLU features without a window: denominators near zero amplify rounding without bound. Without a linear part the
# gradient of gamma is a sum of terms that cancel.
CHUNKED += [
    Row(config, 97, None, varied(turn) | {"head_dim": 8, "dtype": torch.float32}, return_state=False)
    for turn, config in enumerate(CONFIGS) if config not in ("terraced 0 map=t2r", "sliding 8 sinks=2 map=None")
]  # fmt: skip
TRITON = [
    Row("terraced 64", 1),
    Row("terraced 64", 64),
    Row("terraced 64", 130, None, {"share": "query_head"}),
    Row("terraced 128 sinks=1 cap=150", 200, None, BF16),
    Row("terraced 16 sinks=3", 66, None, {"heads": 4, "kv_heads": 2, "head_dim": 20, "columns": 10} | SINKS),
    Row("terraced 16 sinks=3", FIVE),
    Row("sliding 20 sinks=3", 80, (71, 20, 3), {"share": "query_head"}),
    Row("sliding 70 map=t2r", 100),
    Row("terraced 48 blocks=3 map=t2r", 100, (50,)),
    Row("terraced 8 map=None", 70),
    Row("sliding 20 sinks=3 cap=30", FIVE, (71, 0, 20, 5, 79), SINKS, 2.0),
    Row("terraced 8 map=None", 70, None, SINKS, 0.7),
    Row("sliding 0", 70, None, SINKS, 5.0),
    # With the rounding of y the error of gamma's gradient would be 7.0e-3.
    Row("terraced 64 sinks=1", 170, None, BF16 | {"columns": 128}, return_state=False),
    Row("sliding 20 cap=30", 70),
    Row("terraced 4 sinks=1 cap=20", 20, return_state=False),  # a cap that no token passes
    Row("terraced 4", (0, 0)),
    Row("terraced 4", (0, 128, 0)),
]
SLOW = [
    Row("terraced 64", FIVE, (71, 0, 20, 5, 79)),
    Row("sliding 0 sinks=2", FIVE),
    Row("terraced 64", 130, None, SINKS | BF16),
    Row("sliding 20 sinks=3", 80, (71, 20, 3), BF16, 2.0),
    Row("terraced 16 sinks=3 cap=9", 80, (71, 20, 0)),
]
MANY = (1, 63, 64, 65, 0, 130, 3, 500, 1000)
GROUPED = {"heads": 6, "kv_heads": 2}
MOST_SINKS = [c.replace("sinks=70", "sinks=64") for c in CONFIGS]  # the kernels refuse more
ON_GPU = [Row(c, 200, None, GROUPED | {"share": s}) for c, s in product(MOST_SINKS, ("kv_head", "query_head"))]
ON_GPU += [
    Row(config, tokens, before, GROUPED)
    for config, (tokens, before) in product(
        ("terraced 64 sinks=1", "sliding 20 sinks=3"),
        [*((n, None) for n in (1, 63, 64, 65)), (FIVE, None), (FIVE, (71, 0, 20, 5, 79)), (80, (71, 20, 3))],
    )
]
EVERY = every_size(("terraced 64", "terraced 64 sinks=1", "sliding 20 sinks=3", "sliding 0"))
EVERY = [(config, GROUPED | sizes | {"batch": 2}) for config, sizes in EVERY]
ON_GPU += [Row(c, n, None, sizes) for (c, sizes), n in product(EVERY, (500, MANY)) if c != "sliding 0" or n == 500]
SCORED = ((64, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32))
SCORED = [(c, sizes) for c, sizes in EVERY if (sizes["head_dim"], sizes["dtype"]) in SCORED and c != "sliding 0"]
ON_GPU += [
    Row(config, tokens, None, sizes | more, softcap)
    for (config, sizes), tokens, (more, softcap) in product(SCORED, (500, MANY), ((SINKS, None), ({}, 2.0)))
]
MATRIX = [("chunked", row) for row in CHUNKED]
MATRIX += [pytest.param("triton", row, marks=needs_triton) for row in TRITON]
MATRIX += [pytest.param("triton", row, marks=[needs_triton, pytest.mark.slow]) for row in SLOW]
MATRIX += [pytest.param("triton", row, marks=pytest.mark.gpu) for row in ON_GPU]


@pytest.mark.parametrize(("backend", "row"), MATRIX, ids=str)
def test_outputs_states_and_gradients(backend, row):
    check(row, backend)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_on_a_fine_grid(monkeypatch, seed):
    """Small chunks: many of them, aligned in all ways, at little cost."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    monkeypatch.setattr(chunked_module, "MIN_CHUNK_TOKENS", draw(1, 2, 3, 8))
    config = f"{draw('sliding', 'terraced')} {draw(0, 1, 2, 3, 5, 9)} blocks={draw(1, 2, 3, 4)}"
    config += f" sinks={draw(0, 0, 1, 6)} map={draw(*FEATURE_MAPS)}"
    for before in (None, (draw(1, 8, 13), 0, 5)):
        check(Row(config, draw(7, 20, 41), before, varied(seed) | {"batch": 3}, draw(None, 1.5)), "chunked")


def test_feature_maps_take_large_inputs():
    for phi in FEATURE_MAPS.values():
        features = phi(1e3 * torch.randn(2, 3, 5, 8), torch.randn(3, 8, 4), torch.randn(3, 4) if phi.has_bias else None)
        assert features.shape == (2, 3, 5, 4 * phi.multiple)
        assert features.isfinite().all()
        assert (features >= 0).all()
        assert (phi.default_dim(64) * phi.multiple, phi.default_dim(1)) == (64, 1)


@pytest.mark.parametrize("config", ["sliding 70 sinks=3", "terraced 64", "sliding 0"])
def test_half_precision_is_computed_in_float32(config):
    """Only the output is rounded to the activations' type; sums stay float32, the ring keeps the type."""
    half = make_case(config, 150, dtype=torch.bfloat16)
    y, state = half.run("chunked", return_state=True)
    expected, _ = exact(half).run("reference")
    assert (y.dtype, state.S.dtype, state.z.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (state.k.dtype, state.sink_v.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)  # half a unit in the last place
    full = half.map(torch.Tensor.float)
    plain, _ = full.run("chunked")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (full.q @ full.q.mT).dtype == torch.bfloat16  # autocast is on
        assert torch.equal(full.run("chunked")[0], plain)


@needs_triton
@torch.no_grad()
def test_kernels_without_autograd():
    """Nothing is saved, nothing else changes; rows in any memory layout."""
    case = make_case("sliding 20 sinks=3", 70)
    with torch.enable_grad():
        expected = results(case, "triton")["output"]
    assert torch.equal(case.run("triton")[0], expected)
    assert torch.equal(replace(case, q=case.q.contiguous(), v=case.v.contiguous()).run("triton")[0], expected)


# --- any split, padding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_any_split_is_the_whole(config):
    """Chunks and single tokens, of sequences at one place, and at different ones with some that pause."""
    case = make_case(config, 160, **varied(CONFIGS.index(config)) | {"batch": 3, "sink_logits": False})
    mask = (torch.rand(3, 160) < torch.tensor([1.0, 0.2, 0.7])[:, None]).to(DEVICE)
    for mask_BT in (torch.ones_like(mask), mask):
        outputs, state, begin = [], None, 0
        for size in random_pieces(160, CONFIGS.index(config)):
            piece, real = case.part(begin, begin + size), mask_BT[:, begin : begin + size]
            if mask_BT is mask:
                piece, cu_seqlens = packed(piece, real)
                y, state = piece.run("chunked", state=state, cu_seqlens=cu_seqlens, return_state=True)
                outputs.append(unpacked(y, real))
            else:
                y, state = piece.run("chunked", state=state, return_state=True)
                outputs.append(y)
            begin += size
        row, cu_seqlens = packed(case, mask_BT)
        y, after = alone(row, cu_seqlens)
        found = {"y": torch.cat(outputs, dim=2)} | state._asdict()
        assert_near(found, {"y": unpacked(y, mask_BT)} | after._asdict(), torch.float64)


@pytest.mark.parametrize("config", ["terraced 4 map=t2r", "terraced 48 sinks=3 cap=70", "sliding 8 sinks=2 map=None"])
@pytest.mark.parametrize("backend", ["reference", "chunked", pytest.param("triton", marks=needs_triton)])
@torch.no_grad()
def test_keys_and_values_in_eight_bits(backend, config):
    """However they are read, the results are those of the rounded ones, and windows keep them packed."""
    case = make_case(replace(config_of(config), cache_bits=8), 150, batch=1 + GPU, heads=2 + 2 * GPU, kv_heads=2)
    rounded = replace(case, k=unpack(pack(case.k), case.q.dtype), v=unpack(pack(case.v), case.q.dtype))
    y, state = replace(rounded, config=config_of(config)).run("reference", return_state=True)
    found = {"whole": case.run(backend, return_state=True)}
    if backend != "reference":
        outputs, after = [], None
        for begin, end in pairwise([0, 70, 71, 120, 149, 150]):
            part, after = case.part(begin, end).run(backend, state=after, return_state=True)
            outputs.append(part)
        found["parts"] = torch.cat(outputs, 2), after
    for own_y, after in found.values():
        assert_near({"y": own_y, "S": after.S}, {"y": y, "S": state.S}, case.q.dtype)
        for name in ("k", "v", "sink_k", "sink_v"):
            assert torch.equal(unpack(getattr(after, name), case.q.dtype), getattr(state, name))


@pytest.mark.parametrize("config", ["terraced 4", "terraced 16 sinks=3 cap=70", "sliding 0"])
@torch.no_grad()
def test_long_inputs_are_cut_into_pieces(monkeypatch, config):
    monkeypatch.setattr(chunked_module, "PIECE_TOKENS", 64)
    case = make_case(config, 210, batch=3, dtype=torch.float64)
    expected = results(case, "reference", gradients=False, return_state=True)
    assert_near(results(case, "chunked", gradients=False, return_state=True), expected, torch.float64)
    assert_near({"y": case.run("chunked")[0]}, {"y": expected["output"]}, torch.float64)


# --- decoding: single tokens from an empty state -----------------------------------------------------------------

# Windows small enough that a few times their capacity is quick through the interpreter; all parts of the kernel.
STEPS = (
    "terraced 5 blocks=3", "terraced 4 sinks=10 map=t2r", "terraced 4 sinks=2 cap=9", "terraced 4 map=None",
    "terraced 20 blocks=1", "sliding 1", "sliding 7 sinks=3", "sliding 4 cap=9",
    "sliding 0 sinks=2",
)  # fmt: skip
LONG = ("terraced 64", "terraced 48 blocks=3", "terraced 100 sinks=5", "sliding 70 sinks=3")
STEP_ROWS = [Row(config, 60, None, varied(turn) | {"batch": 3}) for turn, config in enumerate(CONFIGS)]
STEP_ROWS += [
    Row(c, (3 if GPU else 2) * min(max(config_of(c).capacity, 4), 10) + 4, None, {"batch": 2, "share": share})
    for c, share in zip(STEPS, 5 * ("kv_head", "query_head"), strict=False)
]
STEP_ROWS += [
    Row(STEPS[2], 14, None, {"heads": 6, "kv_heads": 2, "head_dim": 20, "columns": 10, "share": "query_head"}),
    Row(STEPS[2], 13, None, {"heads": 3, "kv_heads": 3}),
    Row(STEPS[2], 13, None, {"head_dim": 48, "columns": 100}),  # S does not fit into one tile
    Row(STEPS[6], 9, None, {"head_dim": 48, "columns": 100}),
    Row(STEPS[0], 20, None, BF16),
    Row(STEPS[6], 12, None, BF16 | {"dtype": torch.float16}),
    Row(STEPS[7], 12, None, SINKS, 0.7),
    Row(STEPS[2], 12, None, SINKS, 0.7),
]
STEPS_ON_GPU = [
    Row(config, 330, None, {"batch": 3, "heads": 8, "kv_heads": 2, "share": share} | sizes)
    for share, pairs in (
        ("kv_head", every_size(LONG, SIZES[:1]) + every_size((LONG[0], LONG[3]), SIZES[1:])),
        ("query_head", every_size(LONG, SIZES[:1])),
    )
    for config, sizes in pairs
]
# More sequences than a tile of features has, and one program a head.
LARGE = {"batch": 300, "heads": 32, "kv_heads": 8, "dtype": torch.bfloat16}
STEPS_ON_GPU += [Row(config, 200, None, LARGE) for config in (LONG[0], LONG[3])]


def check_steps(row: Row) -> None:
    """Of a batch at different positions, some of which pause, and through the step of the case's type."""
    case, _, options = row.inputs()
    options.pop("return_state")
    mask = late(len(case.q), case.tokens) if len(case.q) > 1 else None
    if len(case.q) > 100:
        mask |= torch.arange(len(case.q), device=DEVICE)[:, None] > 40
    check_decoding(case, chunked_step if case.q.dtype == torch.float64 else triton_step, mask=mask, **options)


@pytest.mark.parametrize("row", STEP_ROWS, ids=str)
def test_decoding(row):
    if row.sizes.get("dtype") != torch.float64:
        pytest.importorskip("triton")
    check_steps(row)


@pytest.mark.gpu
@pytest.mark.parametrize("row", STEPS_ON_GPU, ids=str)
def test_decoding_of_every_size_and_type(row):
    check_steps(row)


@needs_triton
@pytest.mark.parametrize(
    ("config", "constants"),
    [
        *product((STEPS[2], STEPS[6]), ({"MOST_FOLDING": 1}, {"MOST_FOLDING": 3})),
        *product((STEPS[6],), ({"MOST_SEQUENCES": 4, "ENOUGH_PROGRAMS": n} for n in (1, 264))),
    ],
    ids=str,
)
def test_work_is_dealt_out(config, constants, monkeypatch):
    """States that change, among fewer programs than there are; columns to one program a head, or four."""
    from triton import language as tl

    from lolcats.ops.hybrid_attention.kernels import decode as module

    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    if not GPU:  # where it is compiled in, and there are more sequences
        monkeypatch.setattr(module, "_SEQUENCES", tl.constexpr(2))
    batch, tokens = (1030, 14) if GPU and "MOST_FOLDING" in constants else (5, 11)
    case = make_case(config, tokens, batch=batch, share="query_head", head_dim=64 if len(constants) > 1 else 16)
    begin = torch.arange(batch, device=DEVICE)[:, None] % 5
    check_decoding(case, mask=torch.arange(tokens, device=DEVICE) >= begin)


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("config", ["terraced 64", "terraced 100 sinks=5"])
def test_long_blocks_leave(config):
    """Two steps after a prompt: a block leaves in the second, in the first, in none."""
    capacity = config_of(config).capacity
    case = make_case(config, capacity + 2)
    expected, _ = exact(case).run("reference")
    for seen, leaves in ((capacity - 1, True), (capacity, True), (capacity - 3, False)):
        _, state = case.part(0, seen).run("reference", return_state=True)
        for at in (seen, seen + 1):
            y, state = triton_step(case.part(at, at + 1), state=state)
            assert_near({"y": y}, {"y": expected[:, :, at : at + 1]}, case.q.dtype)
        assert bool(state.z.any()) == leaves


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        *product(["chunked"], CONFIGS),
        *(pytest.param("triton", config, marks=needs_triton) for config in (STEPS[2], STEPS[7])),
    ],
)
@torch.no_grad()
def test_steps_write_their_state_and_no_other_call_does(backend, config):
    """Rows of any memory layout; nothing is written where autograd, or a caller out of inference mode, may need it."""
    case = make_case(config, 30, batch=2, dtype=torch.float64 if backend == "chunked" else torch.float32)
    state = case.part(0, 12).run(backend, return_state=True)[1]
    now, before, other = case.part(12, 13), state.clone(), state.clone()
    case.part(12, 14).run(backend, state=state, return_state=True)
    with torch.enable_grad():
        now.run(backend, state=state, return_state=True)
    now.run(backend, state=state._replace(z=before.z.clone(), S=state.S.clone().requires_grad_()), return_state=True)
    with torch.inference_mode():
        y_inference, inferred = now.run(backend, state=state.clone(), return_state=True)
        kept = state.clone()
    now.run(backend, state=kept, return_state=True)
    for name, x in before._asdict().items():
        assert torch.equal(state._asdict()[name], x), f"the given state.{name} changed"
        assert torch.equal(kept._asdict()[name], x), f"inference mode's state.{name} changed"
    y, after = now.run(backend, state=state, return_state=True)
    strided, same = replace(now, q=now.q.contiguous(), k=now.k.clone()).run(backend, state=other, return_state=True)
    assert torch.equal(y, strided)
    assert torch.equal(y, y_inference)
    assert not torch.equal(before.position, state.position)
    for name, x in after._asdict().items():
        assert x.data_ptr() == state._asdict()[name].data_ptr(), name
        assert torch.equal(x, same._asdict()[name]), name
        assert torch.equal(x, inferred._asdict()[name]), name
    assert after.nbytes == before.nbytes


@pytest.mark.parametrize(
    ("step", "config", "tokens"),
    [
        (chunked_step, "terraced 16", 2000),
        (chunked_step, "sliding 16 sinks=2", 2000),
        *(
            pytest.param(triton_step, config, 4000 if GPU else 44, marks=[needs_triton, pytest.mark.slow])
            for config in (STEPS[0], STEPS[6])
        ),
    ],
)
def test_errors_do_not_grow(step, config, tokens):
    """Decoding bfloat16 activations is as exact at the end as just after the window filled: sums are in float32."""
    case = make_case(config, tokens, dtype=torch.bfloat16)
    case.v = (1.0 + case.v.float()).to(torch.bfloat16)  # with a mean, so that outputs do not shrink
    y, state = decode(case, step)
    expected, after = exact(case).run("chunked", return_state=True)
    error = ((y.double() - expected).square().mean((0, 1, 3)) / expected.square().mean((0, 1, 3))).sqrt()
    quarter = tokens // 4
    assert error[-quarter:].mean() <= (1.1 if step is chunked_step else 1.25) * error[quarter : 2 * quarter].mean()
    assert error.max() <= 3 * TOLERANCE[torch.bfloat16]
    # Sums of 4 000 float32 terms: at most 4 000 x 6e-8 = 2.4e-4, as a random walk 4e-6.
    for found, right in ((state.S, after.S), (state.z, after.z)):
        assert (found - right).norm() < 2e-5 * right.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [STEPS[0], STEPS[6]])
def test_cuda_graphs(config):
    """A captured step, replayed, is the step."""
    case = make_case(config, 40, batch=3, dtype=torch.bfloat16)
    mask = late(3, 40)
    expected, after = decode(case, triton_step, mask)
    _, state = decode(case.part(0, 1), triton_step, torch.zeros_like(mask[:, :1]))
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
    for part, tensor in state._asdict().items():
        assert torch.equal(tensor, after._asdict()[part]), part

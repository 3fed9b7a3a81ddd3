"""Kernels in Gluon, against `reference` in float64, on the GPUs and with the release of Triton they were made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_kit import Case, assert_near, check, exact, layout, make_case, state_after

from lolcats.config.attention import AttentionConfig
from lolcats.ops.hybrid_attention.kernels import launch, shape

pytest.importorskip("triton.experimental.gluon")
forward_gluon = pytest.importorskip("lolcats.ops.hybrid_attention.kernels.forward_gluon")
gluon_states = pytest.importorskip("lolcats.ops.hybrid_attention.kernels.forward_states_gluon")

IS_TAKEN = launch.HAS_GLUON and torch.cuda.is_available() and launch.is_hopper(torch.device("cuda"))
CONFIG = AttentionConfig("terraced", 64)


def needs_hopper(test):
    why = "the kernels were made for Hopper and Triton 3.6"
    return pytest.mark.gpu(pytest.mark.skipif(not IS_TAKEN, reason=why)(test))


def make(tokens: int, **sizes: Any) -> Case:
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 128, "columns": 64, "dtype": torch.bfloat16} | sizes
    return make_case(CONFIG, tokens, **sizes)


@pytest.fixture
def small_calls(monkeypatch):
    """The kernels take calls of any size."""
    monkeypatch.setattr(shape, "CROWDED_TILES", 1)
    monkeypatch.setattr(gluon_states, "_SEGMENT_CHUNKS", 1)


@torch.no_grad()
@needs_hopper
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 129, 200, 1000])
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_and_states(tokens, batch, kernels, small_calls):
    check(make(tokens, batch=batch), gradients=False, return_state=True)
    assert "shared_kernel" in kernels
    assert "segment_kernel" in kernels
    assert "direct_kernel" not in kernels


@torch.no_grad()
@needs_hopper
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4000), (9, 1300), (40, 520)])
def test_more_chunks_than_programs(batch, tokens, kernels, small_calls):
    """Programs that begin and end anywhere, and segments whose sums have one part or several."""
    check(make(tokens, batch=batch, heads=32, kv_heads=8), gradients=False, return_state=True)
    assert "shared_kernel" in kernels


@torch.no_grad()
@needs_hopper
def test_other_tensors_of_the_same_kind(kernels, small_calls):
    """Later calls repeat the launches of the first; their inputs lie elsewhere, in memory laid out alike."""
    first = make(300, batch=2)
    cases = [first, *(first.map(lambda x, by=by: x.clone().copy_(x.roll(by, -1))) for by in (1, 2))]
    found = [case.run("triton")[0] for case in cases]  # all inputs and outputs are there at once
    for case, y in zip(cases, found, strict=True):
        assert_near({"output": y}, {"output": exact(case).run("reference")[0]}, torch.bfloat16)
    assert kernels.count("shared_kernel") == 1


class Recorder:
    """In the place of a compiled kernel: what its launches got."""

    arg_names = ("x", "w", "y", "count", "FLAG")

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid):
        def run(*arguments, stream=None, **constants):
            self.launches.append((grid, arguments, constants or stream))
            return self

        return run


def test_every_launch_has_its_own_descriptors(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_stream", lambda device: "stream")
    recorder = Recorder()
    kernel = forward_gluon.TileKernel(recorder, (1, 1, 64, 128), (128, 64))
    plan = launch.Plan(torch.device("cpu"))
    sizes = [(2, 70, 3, 128), (4, 128, 64), (5,)]
    calls = [[torch.randn(size).to(torch.bfloat16) for size in sizes] for _ in range(3)]
    calls = [(x.transpose(1, 2), w, y) for x, w, y in calls]
    for x, w, y in calls:
        plan.run((x, w, y), lambda x=x, w=w, y=y: plan.launch(kernel, (7,), x, w, y, 9, FLAG=True, num_warps=4) or ())
    assert [launched[0] for launched in recorder.launches] == [(7,), (7, 1, 1), (7, 1, 1)]
    assert [launched[2] for launched in recorder.launches] == [{"FLAG": True, "num_warps": 4}, "stream", "stream"]
    for (x, w, y), (_, arguments, _) in zip(calls, recorder.launches, strict=True):
        tiles, others = arguments[:2], arguments[2:]
        assert tiles[0].base is x
        assert tiles[1].base is w
        assert others[0] is y
        assert others[1:] in ((9,), (9, True))
        assert [(tile.shape, tile.strides, tile.padding) for tile in tiles] == [
            ([2, 3, 70, 128], [70 * 3 * 128, 128, 3 * 128, 1], "zero"),
            ([4 * 128, 64], [64, 1], "zero"),
        ]


@torch.no_grad()
@needs_hopper
@pytest.mark.parametrize("gamma", [[-0.1, 0.0, 0.5, 1.0], [0.02, 3.0, 1e-3, 0.3]])
def test_any_gamma(gamma, kernels, small_calls):
    case = make(200, heads=4, kv_heads=1)
    case.params = case.params._replace(gamma=torch.tensor(gamma, device=case.q.device).abs())
    check(case, gradients=False)
    assert "shared_kernel" in kernels


@needs_hopper
def test_gradients_read_its_states(kernels, small_calls):
    check(make(500), return_state=True)
    assert "segment_kernel" in kernels
    assert "direct_kernel" in kernels  # which saves what they need


@torch.no_grad()
@needs_hopper
@pytest.mark.parametrize("how", ["left", "documents", "borders"])
def test_leaves_padded_and_packed_sequences(how, kernels, small_calls):
    batch, _, options, padding = layout(how)
    case = make(padding.shape[1], batch=batch)
    check(case, wrong=case.with_nan_where(padding), gradients=False, **options)
    assert "shared_kernel" not in kernels
    assert "segment_kernel" not in kernels


@torch.no_grad()
@needs_hopper
def test_leaves_resumed_sequences(kernels, small_calls):
    case = make(100, batch=2)
    state = state_after(case, (71, 20))
    kernels.clear()
    check(case, state=state, gradients=False, return_state=True)
    assert "shared_kernel" not in kernels


@torch.no_grad()
@needs_hopper
@pytest.mark.parametrize("change", [{"heads": 4}, {"heads": 16}, {"share": "query_head"}], ids=str)
def test_leaves_other_heads(change, kernels, small_calls):
    check(make(130, **change), gradients=False)
    assert "shared_kernel" not in kernels


@pytest.mark.parametrize("rows", [1, 8, 24, 64, 100, 132, 512])
@pytest.mark.parametrize("chunks", [1, 2, 9, 63, 64, 1024])
def test_segments_cover_all_chunks(rows, chunks):
    count, length, parts = gluon_states.split(rows, chunks, 132)
    assert (count - 1) * length < chunks <= count * length
    assert length % parts == 0
    assert count == 1 or rows * max(count, (count - 1) * parts) <= 132

"""The decoding benchmark on the tiny shape."""

from __future__ import annotations

import copy
import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache

from lolcats.bench import decode, decode_latency, decode_profile, decode_throughput
from lolcats.bench.decode import DecodeBench
from lolcats.bench.decode_floor import Work, linear_work, softmax_work
from lolcats.bench.decode_plot import plot
from lolcats.bench.decode_session import Session, spread
from lolcats.bench.decode_softmax import SoftmaxDecoder, mean_over_run, original_attention
from lolcats.bench.models import random_model
from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.generation.runner import Runner
from lolcats.modeling.call import SOFTMAX

QUIET = Console(quiet=True)
LIMITS = {"copy_tb_s": 1.0, "matmul_tflop_s": 1.0}
SMALL = DecodeBench(
    model="tiny",
    batches=(1, 2),
    softmax_batches=(1, 2),
    prompt_tokens=12,
    new_tokens=20,
    softmax_steps=2,
    full_run_batch=2,
    positions=(50, 1000),
    prefill_lengths=(8, 40),
    prefill_chunk=16,
    endurance_model="tiny",
    endurance_tokens=20,
    endurance_chunk=5,
    seconds=1e6,
    attention=AttentionConfig(window_size=4),
    dtype="float32",
    device="cpu",
)


def changed(**fields) -> DecodeBench:
    return DecodeBench(**{**vars(SMALL), **fields})


@pytest.fixture(autouse=True)
def _given_ceilings(monkeypatch):
    monkeypatch.setattr(decode, "ceilings", lambda device: LIMITS)


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", SMALL.attention, tokens=64, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def kept():
    """The report as it was kept each time."""
    return []


@pytest.fixture(scope="module")
def report(kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "ceilings", lambda device: LIMITS)
        return decode.run(SMALL, QUIET, lambda found: kept.append(copy.deepcopy(found)))


def rows(report, section):
    return report["sections"][section]["rows"]


def test_every_section_has_its_rows(report):
    found = {name: [row["system"] for row in section["rows"]] for name, section in report["sections"].items()}
    both = ["lolcats", "lolcats", "softmax", "softmax"]
    assert found == {
        "throughput": ["lolcats"] * 2,
        "softmax": ["softmax"] * 2,
        "latency": both,
        "prefill": ["lolcats", "softmax"] * 2,
        "endurance": ["lolcats"],
    }
    assert not [row for name in found for row in rows(report, name) if "error" in row]
    assert json.loads(json.dumps(report))["settings"]["attention"]["window_size"] == 4


def test_throughput_is_batch_over_step_time(report):
    for section in ("throughput", "softmax"):
        for row in rows(report, section):
            assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3)
    row = rows(report, "throughput")[1]
    assert row["steps_measured"] == 2 * 4  # two whole blocks
    assert row["finite"]
    assert row["run_tokens_per_sequence"] == 12 + 20
    assert "run_s" not in rows(report, "throughput")[0]  # only at the batch size asked for


def test_state_bytes_are_those_of_the_shapes(report):
    # 2 layers of 2 heads: state 16 x 16 + 16 sums and a ring of 8 keys and values of 16 numbers, then a position.
    expected = 2 * (2 * (16 * 16 + 16 + 2 * 8 * 16) * 4 + 8)
    assert [row["state_mib_per_sequence"] * 2**20 for row in rows(report, "throughput")] == [expected, expected]


def test_softmax_steps_are_timed_over_the_whole_run(report):
    contexts = [int(context) for context in rows(report, "softmax")[0]["step_ms_at_context"]]
    assert (contexts[0], contexts[-1], len(contexts)) == (12, 12 + 20 - 4, 4)
    assert mean_over_run([0, 10, 30], [1.0, 3.0, 5.0]) == pytest.approx((10 * 2 + 20 * 4) / 30)
    assert mean_over_run([7], [2.0]) == 2.0


def test_endurance_generates_every_token(report):
    row = rows(report, "endurance")[0]
    assert (row["tokens"], row["stopped_by_time"], row["finite"]) == (20, False, True)
    assert row["position"] == 12 + 4 + 20  # prompt, warm-up, tokens


def test_rows_are_kept_as_they_come(report, kept):
    numbers = [sum(len(section["rows"]) for section in found["sections"].values()) for found in kept]
    assert numbers[0] == 0
    assert sorted(set(numbers)) == list(range(14))
    assert kept[-1] == report


def test_tables_and_picture_show_failures(report, tmp_path):
    failed = copy.deepcopy(report)
    failed["sections"]["softmax"]["rows"].append({"system": "softmax", "batch": 4, "error": "out of memory"})
    failed["sections"]["prefill"]["error"] = "RuntimeError: lost"
    stream = io.StringIO()
    decode.print_table(failed, Console(file=stream, width=250))
    text = stream.getvalue()
    assert all(words in text for words in ("throughput", "latency", "endurance", "out of memory", "prefill: Runtime"))
    pytest.importorskip("matplotlib")
    plot(failed, tmp_path / "new" / "decode.png")
    assert (tmp_path / "new" / "decode.png").read_bytes().startswith(b"\x89PNG")
    plot({**report, "sections": {}}, tmp_path / "empty.png")


def test_out_of_memory_is_a_result_and_ends_softmax_only(monkeypatch):
    def fail(base, batch, context):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decode_throughput, "SoftmaxDecoder", fail)
    report = decode.run(changed(sections=("softmax", "throughput")), QUIET)
    errors = [row["error"] for row in rows(report, "softmax")]
    assert errors == ["out of memory", "not tried: batch 1 ran out of memory"]
    assert all("tokens_per_s" in row for row in rows(report, "throughput"))


def test_a_failing_section_leaves_the_others(monkeypatch):
    monkeypatch.setitem(decode.RUN, "latency", lambda session: 1 / 0)
    report = decode.run(changed(sections=("latency", "endurance")), QUIET)
    assert report["sections"]["latency"]["error"] == "ZeroDivisionError: division by zero"
    assert len(rows(report, "endurance")) == 1


def test_what_there_is_no_time_for_says_so():
    report = decode.run(changed(seconds=0.0), QUIET)
    for section in ("throughput", "softmax", "latency", "prefill"):
        assert {row["error"][:12] for row in rows(report, section)} == {"not measured"}
    row = rows(report, "endurance")[0]
    assert (row["tokens"], row["stopped_by_time"]) == (5, True)


def test_unused_time_goes_to_later_sections(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lolcats.bench.decode_session.time.perf_counter", lambda: clock.now)
    session = Session(changed(sections=("throughput", "endurance"), seconds=56.0), QUIET, lambda report: None)
    session.begin_section("throughput")
    assert session.left_s == pytest.approx(56.0 * 0.38 / (0.38 + 0.18))
    clock.now = 6.0
    session.begin_section("endurance")
    assert session.left_s == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "huge"}, "huge"),
        ({"sections": ("nap",)}, "nap"),
        ({"batches": (0,)}, "at least 1"),
        ({"full_run_batch": 3}, "full_run_batch=3"),
        ({"new_tokens": 3}, "new_tokens=3"),
        ({"attention": AttentionConfig(keep_softmax=[0])}, "keep_softmax"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        decode.run(changed(**wrong), QUIET)


def test_original_attention_is_that_of_transformers(model):
    tokens = torch.randint(256, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        linear = model(tokens).logits
        with original_attention(model) as base:
            assert base.config._attn_implementation == "sdpa"
            softmax = base(tokens).logits
        expected = model(tokens, attention_call=SOFTMAX).logits
        assert torch.equal(model(tokens).logits, linear)  # as before
    torch.testing.assert_close(softmax, expected, rtol=1e-4, atol=1e-5)  # other order of sums, float32
    assert not torch.allclose(softmax, linear, atol=1e-3)


def test_softmax_decoder_grows_its_cache(model):
    with original_attention(model) as base:
        decoder = SoftmaxDecoder(base, 3, 10)
        decoder.step()
        decoder.step()
    assert isinstance(decoder.cache, DynamicCache)
    assert decoder.cache.layers[1].keys.shape == (3, 2, 12, 16)


def test_setting_the_position_moves_the_state_only(model):
    runner = Runner(model, 1)
    decode_throughput.prefill_prompts(runner, 1, 12, 16)
    before = runner.read(0)
    decode_throughput.set_position(runner, 1000)
    after = runner.read(0)
    assert runner.lengths == runner.length_S.tolist() == [1000]
    assert after["1.position"] == 1000
    assert torch.equal(before["1.S"], after["1.S"])
    runner.decode_greedy(1, 3)
    assert runner.read(0)["1.position"] == 1003


def test_prompts_are_read_afresh(model):
    runner = Runner(model, 5)
    decode_throughput.prefill_prompts(runner, 5, 12, 24)  # two at a time
    first, tokens = runner.read(4), runner.token_S.tolist()
    decode_throughput.prefill_prompts(runner, 5, 12, 1000)
    assert runner.lengths == [12] * 5
    assert runner.token_S.tolist() == tokens
    for name, tensor in runner.read(4).items():
        torch.testing.assert_close(tensor, first[name], rtol=1e-4, atol=1e-5)  # float32, other batch


def test_work_is_counted_from_shapes(model):
    # tiny, window of 2 blocks of 4 tokens, 2 layers, 4 query and 2 key/value heads of 16, 8 columns, 16 features
    attention = 64 * 64 * 2 + 64 * 32 * 2
    matrices = 2 * (attention + 3 * 64 * 128) + 256 * 64
    maps = 2 * (4 + (4 + 2) * 16 * 8)
    norms = 5 * 64
    work = linear_work(model)
    assert work.weight_bytes == 4 * (matrices + norms + maps)
    keys = 4 + 2.5  # the block before, and half of its own
    window_bytes = 2 * 2 * 16 * 4 * (keys + 2)  # one token written, a block of 4 read once in 4 steps
    state_bytes = 2 * 16 * 17 * 4 * (1 + 1 / 4)
    assert work.sequence_bytes == pytest.approx(2 * (window_bytes + state_bytes))
    flops = 4 * 4 * 16 * keys + (4 + 2) * (2 * 16 * 8 + 2 * 16 * 17)
    assert work.sequence_flops == pytest.approx(2 * matrices + 2 * flops)
    softmax = softmax_work(model, 100)
    assert softmax.weight_bytes == 4 * (matrices + norms)
    assert softmax.sequence_bytes == 2 * 2 * 2 * 16 * 4 * 102
    assert softmax.sequence_flops == 2 * matrices + 2 * 4 * 4 * 16 * 101


def test_the_floor_is_the_slower_of_moving_and_computing():
    work = Work(weight_bytes=1e9, sequence_bytes=1e6, sequence_flops=1e10)
    assert work.floor(1, LIMITS)["floor_ms"] == pytest.approx(10.0)
    assert work.floor(10, {"copy_tb_s": 0.001, "matmul_tflop_s": 1.0})["floor_ms"] == pytest.approx(1010.0)
    assert work.floor(4, LIMITS)["floor_tokens_per_s"] == pytest.approx(100.0)


def test_the_mean_step_holds_rare_slow_ones():
    step = spread([1.0] * 63 + [65.0])
    assert (step["step_ms"], step["step_ms_median"], step["step_ms_max"]) == (2.0, 1.0, 65.0)


def test_endurance_of_fewer_layers():
    report = decode.run(changed(sections=("endurance",), endurance_layers=1), QUIET)
    assert rows(report, "endurance")[0]["layers"] == 1


def test_profiled_steps_begin_no_block(monkeypatch):
    positions = []

    def calls(step, device):
        for _ in range(8):
            step()
        return {"kernel": 1.0}

    def decode_greedy(runner, count, steps=1):
        original(runner, count, steps)
        positions.append(runner.lengths[0])

    original = Runner.decode_greedy
    monkeypatch.setattr(Runner, "decode_greedy", decode_greedy)
    monkeypatch.setattr(decode_profile, "kernel_times", calls)
    bench = changed(attention=AttentionConfig(window_size=16))
    assert decode_profile.profile_step(bench, 2, QUIET) == {"kernel": 1.0}
    assert positions[0] >= 2 * 16
    assert [position % 16 for position in positions] == list(range(1, 10))


def test_zero_endurance_tokens_are_none():
    report = decode.run(changed(sections=("endurance",), endurance_tokens=0), QUIET)
    assert rows(report, "endurance") == []


def test_latency_without_memory_says_where(monkeypatch):
    def fail(base, batch, context):
        if context > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SoftmaxDecoder(base, batch, context)

    monkeypatch.setattr(decode_latency, "SoftmaxDecoder", fail)
    report = decode.run(changed(sections=("latency",)), QUIET)
    assert [row.get("error") for row in rows(report, "latency")] == [None, None, None, "out of memory"]

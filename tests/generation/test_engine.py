"""The engine: tokens of generate(), whatever runs beside a request; ends, errors, fairness, threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from generation_kit import BOUNDED, CHUNKED, HYBRID
from toy_stage import failing

from lolcats.errors import UserError
from lolcats.generation.engine import MOST_HELD, Engine, Scheduler
from lolcats.generation.request import Piece, Result
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import SamplingParams

LENGTHS = [2, 7, 30, 1, 16, 50, 5, 17]
MODELS = {
    "linear": {},
    "sliding-window": {"attention": {"window": "sliding", "window_size": 4, "sinks": 2, "linear_length_cap": 20}},
    "hybrid-native-window": HYBRID,
    "hybrid-softmax-first": {"family": "qwen3", "attention": {"exact": [0, "1.1"]}},
    "exact-heads-native-window": HYBRID | {"attention": {"exact": ["0.1", "1.0", 3], "sliding_layers": "linearize"}},
    "exact-window": BOUNDED,
    "exact-window-without-sinks": {"attention": {"exact": [0, "1.1"], "exact_window": 4}},
    "exact-8-bits": {"attention": {"exact": ["0.1", 1], "cache_bits": 8}},
    "exact-8-bits-window": {"attention": BOUNDED["attention"] | {"cache_bits": 8}},
    "exact-window-native-window": HYBRID
    | {"attention": {"exact": ["0.1", "1.0", 3], "sliding_layers": "linearize", "exact_window": 9, "sinks": 1}},
    "shared-keys": {"family": "gemma4-shared-keys", "vocab_size_per_layer_input": 320}
    | {"attention": {"exact": ["1.0", 2], "sliding_layers": "linearize"}},
    "chunked": CHUNKED,
    "narrow-values": HYBRID | {"family": "mimo", "mlp_layer_types": ["dense"] * 4, "attention": {"exact": ["1.0", 3]}},
    "scaled-logits": {"family": "granite", "logits_scaling": 3.0},
}


def slots_are_free(engine: Engine) -> bool:
    return engine.counts["free_slots"] == engine.runner.cache.max_slots and not engine.busy


@pytest.mark.parametrize(
    ("name", "dtype"), [("linear", torch.float32), *((name, torch.float64) for name in MODELS)], ids=str
)
def test_same_tokens_as_generate(kit, make_engine, name, dtype):
    model = kit.make_model(dtype=dtype, **MODELS[name])
    prompts = [kit.random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    engine = make_engine(model, max_slots=3, prefill_chunk=8)
    results = engine.generate(prompts, SamplingParams(max_new_tokens=14))
    expected = [kit.greedy(model, prompt, 14) for prompt in prompts]
    assert [result.token_ids for result in results] == expected
    assert len({tuple(tokens) for tokens in expected}) > 5
    assert slots_are_free(engine)


def test_finish_reasons(kit, model, make_engine):
    engine = make_engine()
    prompt = kit.random_tokens(9, 0)
    free = engine.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
    assert (free.finish_reason, len(free.token_ids), free.prompt_tokens) == ("length", 40, 9)
    token = free.token_ids[4]
    stopped = engine.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True, stop_token_ids=[token]))[0]
    assert stopped.finish_reason == "stop"
    first = free.token_ids.index(token)
    assert stopped.token_ids == free.token_ids[: first + 1]
    ends = engine.generate([kit.random_tokens(9, seed) for seed in range(8)], SamplingParams(max_new_tokens=100))
    assert any(result.finish_reason == "stop" and result.token_ids[-1] == kit.EOS for result in ends)


def test_logprobs_are_the_models(kit, model, make_engine):
    prompt = kit.random_tokens(7, 2)
    params = SamplingParams(max_new_tokens=8, temperature=0.7, top_k=5, seed=1, logprobs=3, ignore_eos=True)
    result = make_engine().generate([prompt], params)[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + result.token_ids])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    assert result.logprobs == pytest.approx(expected[range(8), result.token_ids].tolist(), abs=1e-9)
    top = expected.topk(3, dim=-1)
    for found, values, indices in zip(result.top_logprobs, top.values.tolist(), top.indices.tolist(), strict=True):
        assert [token for token, _ in found] == indices
        assert [value for _, value in found] == pytest.approx(values, abs=1e-9)
    assert make_engine().generate([prompt], SamplingParams(max_new_tokens=2))[0].logprobs == []


def test_bad_prompts_and_lengths_are_refused_at_once(kit, make_engine):
    engine = make_engine()
    engine.tokenizer = kit.make_tokenizer()
    engine.tokenizer.add_tokens(["<image>"], special_tokens=True)  # beyond the embedding, as Gemma 3's
    for prompt, message in [
        ("a<image>", "token ids from 0 to 259, got 260"),
        ("", "no tokens"),
        ([], "no tokens"),
        ([1, 10_000], "token ids from 0 to 259, got 10000"),
        ([1, True], "got True"),
        (17, "expected text or a list"),
        (None, "expected text or a list"),
        ("a\ud800", "surrogates"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt)
    assert len(engine.generate("abc", SamplingParams(max_new_tokens=1))) == 1
    for prompts, params, message in (
        ([[1], []], None, "no tokens"),
        ([[1]], [SamplingParams(), SamplingParams()], "2 params for 1 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, params)
    while engine.step():
        pass
    assert slots_are_free(engine)
    with pytest.raises(ValueError, match="stop_token_ids: 999 is outside"):
        engine.submit([1], SamplingParams(stop_token_ids=[999]))
    hybrid = kit.make_model(attention={"exact": [0]})
    engine = make_engine(hybrid, max_length=20)
    with pytest.raises(ValueError, match="more than the 20 "):
        engine.submit([1] * 15, SamplingParams(max_new_tokens=6))
    assert engine.generate([[1] * 15], SamplingParams(max_new_tokens=5))[0].finish_reason in ("length", "stop")
    assert not engine.busy


def test_cancel_at_every_stage(kit, make_engine):
    engine = make_engine(max_slots=2, prefill_chunk=4)
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    running = engine.submit(kit.random_tokens(2, 0), params)
    for _ in range(5):
        engine.step()
    prefilling = engine.submit(kit.random_tokens(40, 1), params)
    engine.step()
    waiting = engine.submit(kit.random_tokens(5, 2), params)
    other = engine.submit(kit.random_tokens(5, 3), params)
    assert (engine.counts["running"], engine.counts["prefilling"], engine.counts["waiting"]) == (1, 1, 2)
    for handle in (running, prefilling, waiting):
        handle.cancel()
    engine.step()
    results = [handle.result() for handle in (running, prefilling, waiting)]
    assert [result.finish_reason for result in results] == ["cancelled"] * 3
    assert [bool(result.token_ids) for result in results] == [True, False, False]
    assert other.result().finish_reason == "length"
    assert slots_are_free(engine)
    running.cancel()  # too late: nothing happens
    engine.step()
    assert running.result() is results[0]


def test_long_prompts_do_not_starve_others(kit, make_engine):
    engine = make_engine(max_slots=3, prefill_chunk=4)
    running = engine.submit(kit.random_tokens(2, 0), SamplingParams(max_new_tokens=100, ignore_eos=True))
    engine.step()
    long = engine.submit(kit.random_tokens(200, 1), SamplingParams(max_new_tokens=2))
    short = engine.submit(kit.random_tokens(3, 2), SamplingParams(max_new_tokens=2, ignore_eos=True))
    before = engine.counts["tokens_decoded"]
    for _ in range(4):
        engine.step()
    assert engine.counts["tokens_decoded"] >= before + 4  # a token a step
    assert short.done
    assert not long.done
    for handle in (running, long):
        handle.result()
    assert engine.runner.tokens_prefilled == 205


def test_prompts_of_a_long_line_run_together(kit, make_engine, monkeypatch):
    engine, passes = make_engine(max_slots=64), []
    prefill = engine.runner.prefill
    monkeypatch.setattr(engine.runner, "prefill", lambda slots, x: passes.append(len(slots)) or prefill(slots, x))
    prompts = [kit.random_tokens(3, seed) for seed in range(101)]
    params = [SamplingParams(max_new_tokens=2 + seed * 37 % 101, ignore_eos=True) for seed in range(101)]
    together = engine.generate(prompts, params)
    assert sum(passes) == 101
    assert passes.count(1) <= 1, passes
    alone = make_engine(max_slots=1).generate(prompts[-3:], params[-3:])
    assert [result.token_ids for result in together[-3:]] == [result.token_ids for result in alone]


def test_a_free_slot_waits_for_others_some_steps_at_most(kit, make_engine):
    engine = make_engine(max_slots=64)
    many = SamplingParams(max_new_tokens=60, ignore_eos=True)
    running = [engine.submit(kit.random_tokens(2, seed), many) for seed in range(63)]
    engine.step()
    others = [engine.submit(kit.random_tokens(2, seed), SamplingParams(max_new_tokens=1)) for seed in range(2)]
    for _ in range(MOST_HELD + 2):
        engine.step()
    assert all(other.done for other in others)
    assert not any(request.done for request in running)


def test_a_callback_that_fails_ends_its_request_only(make_engine):
    engine = make_engine()

    def fail(_: Piece) -> None:
        raise KeyError("broken pipe")

    def fail_late(event: Piece) -> None:
        if isinstance(event, Result):
            fail(event)

    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    bad = engine.submit([65], params, on_event=fail)
    good = engine.submit([66], params, on_event=fail_late)
    assert bad.result().finish_reason == "error"
    assert "broken pipe" in bad.result().error
    assert good.result().finish_reason == "length"
    assert slots_are_free(engine)


def test_a_model_that_fails_ends_those_it_ran_for(kit, make_engine):
    engine = make_engine(max_slots=2, prefill_chunk=4)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    running = engine.submit([1], params)
    engine.step()
    with failing(Runner, "prefill", 1, RuntimeError("out of memory")):
        failed = engine.submit([2, 3], params).result()
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: out of memory")
    assert engine.submit([2, 3], params).result().finish_reason == "length"
    assert running.result().token_ids == make_engine().generate([[1]], params)[0].token_ids
    assert slots_are_free(engine)


def test_background_thread(kit, model, make_engine):
    engine = make_engine(max_slots=3).start()
    prompts = [kit.random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]

    def ask(prompt: list[int]) -> list[int]:
        handle = engine.submit(prompt, SamplingParams(max_new_tokens=12))
        assert "".join(handle) == handle.result().text
        return handle.result().token_ids

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, prompts))
    assert answers == [kit.greedy(model, prompt, 12) for prompt in prompts]
    assert engine.generate([[1]], SamplingParams(max_new_tokens=1))[0].finish_reason in ("length", "stop")
    last = engine.submit([5], SamplingParams(max_new_tokens=20, ignore_eos=True))
    engine.shutdown()
    assert last.result().finish_reason == "length"  # it was finished first
    with pytest.raises(RuntimeError, match="shut down"):
        engine.submit([1])


def test_a_broken_engine_and_a_shutdown_leave_nobody_waiting(make_engine, monkeypatch):
    engine = make_engine(max_slots=1)
    params = SamplingParams(max_new_tokens=100_000, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", lambda self: (_ for _ in ()).throw(ZeroDivisionError("a mistake")))
        handles = [engine.submit([index], params) for index in range(3)]
        engine.start()
        assert [handle.result().error for handle in handles] == ["ZeroDivisionError: a mistake"] * 3
    handles = [engine.submit([index], params) for index in range(3)]
    next(iter(handles[0]))  # first come, first served
    engine.shutdown(drain=False)
    assert [handle.result().finish_reason for handle in handles] == ["cancelled"] * 3
    assert [bool(handle.result().token_ids) for handle in handles] == [True, False, False]
    assert slots_are_free(engine)


def test_longrope_is_rotated_by_its_first_factors_alone(make_engine, kit):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = kit.make_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    with pytest.raises(ValueError, match="more than the 32"):
        make_engine(model).submit([1] * 30, SamplingParams(max_new_tokens=3))
    with pytest.raises(UserError, match="max_length=33: beyond 32"):
        make_engine(model, max_length=33)

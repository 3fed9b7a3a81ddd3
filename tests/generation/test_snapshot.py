"""Snapshots: a continuation from one equals the unbroken run; wrong ones are refused."""

from dataclasses import replace

import pytest
import torch

from lolcats.errors import UserError
from lolcats.generation.sampling import SamplingParams

PARAMS = SamplingParams(max_new_tokens=15, ignore_eos=True)


@pytest.mark.parametrize("length", [1, 40])
def test_continuing_equals_the_unbroken_run(kit, any_model, make_engine, length):
    prompt, more = kit.random_tokens(length, 0), kit.random_tokens(4, 1)
    snapshot = make_engine(any_model).snapshot(prompt)
    other = make_engine(any_model, max_slots=2, max_length=100)
    found = [other.submit(more, SamplingParams(max_new_tokens=15), snapshot=snapshot).result() for _ in range(3)]
    assert other.runner.tokens_prefilled == 3 * 4
    assert [item.token_ids for item in found] == [kit.greedy(any_model, prompt + more, 15)] * 3
    assert found[0].prompt_tokens == length + 4
    with pytest.raises(ValueError, match="no tokens"):
        other.submit([], snapshot=snapshot)


def test_the_state_at_the_end_of_an_answer(kit, any_model, make_engine):
    engine = make_engine(any_model)
    prompt = kit.random_tokens(9, 0)
    first = engine.submit(prompt, PARAMS.changed(keep_state=True)).result()
    assert first.snapshot.token_ids == prompt + first.token_ids
    assert first.snapshot.length == len(prompt) + len(first.token_ids) - 1  # the last one was not fed
    second = engine.submit([], PARAMS, snapshot=first.snapshot).result()
    unbroken = engine.submit(prompt, PARAMS.changed(max_new_tokens=30)).result()
    assert first.token_ids + second.token_ids == unbroken.token_ids
    assert engine.submit([1], PARAMS).result().snapshot is None


def test_a_cancelled_request_can_go_on(kit, model, make_engine):
    engine = make_engine(prefill_chunk=4)
    for steps in (1, 8):  # within the prompt, within the answer
        request = engine.submit(kit.random_tokens(9, 0), PARAMS.changed(keep_state=True))
        for _ in range(steps):
            engine.step()
        request.cancel()
        first = request.result()
        assert first.finish_reason == "cancelled"
        rest = engine.submit([], PARAMS, snapshot=first.snapshot).result()
        both = first.token_ids + rest.token_ids
        assert both == kit.greedy(model, kit.random_tokens(9, 0), len(both))


def test_states_that_do_not_fit_are_rejected_by_name(kit, any_model, make_engine):
    engine = make_engine(any_model, max_slots=1)
    snapshot = engine.snapshot(kit.random_tokens(9, 0))
    expected = engine.submit([5], PARAMS, snapshot=snapshot).result().token_ids
    for name, tensor in snapshot.tensors.items():
        wrong = tensor.to(torch.int32 if tensor.dtype.is_floating_point else torch.float32)
        for changed in (snapshot.tensors | {name: wrong}, snapshot.tensors | {name: tensor[..., None]}):
            found = engine.submit([5], PARAMS, snapshot=replace(snapshot, tensors=changed)).result()
            assert found.finish_reason == "error"
            assert "does not fit layer" in found.error
            assert all(part in found.error for part in name.split("."))
        missing = {key: value for key, value in snapshot.tensors.items() if key != name}
        result = engine.submit([5], PARAMS, snapshot=replace(snapshot, tensors=missing)).result()
        assert f"no tensor '{name}'" in result.error
        assert engine.submit([5], PARAMS, snapshot=snapshot).result().token_ids == expected
    with pytest.raises(UserError, match="made by another model"):
        make_engine(kit.make_model()).submit([5], snapshot=snapshot)

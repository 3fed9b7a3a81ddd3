"""Snapshots: a continuation from one equals the unbroken run; wrong ones are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lolcats.errors import UserError
from lolcats.generation.sampling import SamplingParams
from lolcats.generation.snapshot import Snapshot, model_fingerprint

PARAMS = SamplingParams(max_new_tokens=15, ignore_eos=True)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_continuing_equals_the_unbroken_run(kit, any_model, make_engine, tmp_path, length):
    prompt, more, params = kit.random_tokens(length, 0), kit.random_tokens(4, 1), SamplingParams(max_new_tokens=15)
    engine = make_engine(any_model)
    snapshot = engine.snapshot(prompt)
    snapshot.save(tmp_path / "state.safetensors")
    # another engine, of another size, after a restart as it were
    other = make_engine(any_model, max_slots=2, max_length=100)
    loaded = Snapshot.load(tmp_path / "state.safetensors")
    before = other.runner.tokens_prefilled
    found = [other.submit(None, params, snapshot=loaded).result() for _ in range(3)]
    assert other.runner.tokens_prefilled == before + 3  # the prompt's last token only
    assert [item.token_ids for item in found] == [kit.greedy(any_model, prompt, 15)] * 3
    assert found[0].prompt_tokens == length
    longer = other.submit(more, params, snapshot=loaded).result()
    assert longer.token_ids == kit.greedy(any_model, prompt + more, 15)


def test_the_state_at_the_end_of_an_answer(kit, any_model, make_engine):
    engine = make_engine(any_model)
    prompt = kit.random_tokens(9, 0)
    first = engine.submit(prompt, PARAMS, keep_state=True).result()
    assert first.snapshot.token_ids == prompt + first.token_ids
    assert first.snapshot.length == len(prompt) + len(first.token_ids) - 1
    second = engine.submit(None, PARAMS, snapshot=first.snapshot).result()
    unbroken = engine.submit(prompt, PARAMS.changed(max_new_tokens=30)).result()
    assert first.token_ids + second.token_ids == unbroken.token_ids
    assert engine.submit([1], PARAMS).result().snapshot is None


def test_a_cancelled_request_can_go_on(kit, model, make_engine):
    engine = make_engine(prefill_chunk=4)
    for steps in (1, 8):  # within the prompt, within the answer
        handle = engine.submit(kit.random_tokens(9, 0), PARAMS, keep_state=True)
        for _ in range(steps):
            engine.step()
        handle.cancel()
        first = handle.result()
        assert first.finish_reason == "cancelled"
        rest = engine.submit(None, PARAMS, snapshot=first.snapshot).result()
        both = first.token_ids + rest.token_ids
        assert both == kit.greedy(model, kit.random_tokens(9, 0), len(both))


def test_penalties_count_the_snapshots_tokens(kit, make_engine):
    engine = make_engine()
    prompt = kit.random_tokens(20, 0)
    params = SamplingParams(max_new_tokens=15, repetition_penalty=2.0, ignore_eos=True)
    whole = engine.generate([prompt], params)[0].token_ids
    assert engine.submit(None, params, snapshot=engine.snapshot(prompt)).result().token_ids == whole
    assert engine.generate([prompt], PARAMS)[0].token_ids != whole


def test_size_does_not_depend_on_the_prompt(kit, make_engine):
    engine = make_engine()
    small, large = engine.snapshot(kit.random_tokens(5, 0)), engine.snapshot(kit.random_tokens(200, 0))
    assert small.nbytes == large.nbytes == engine.runner.bytes_per_slot


def test_another_models_state_is_refused(kit, make_engine):
    snapshot = make_engine().snapshot(kit.random_tokens(9, 0))
    other = kit.make_model(hidden_size=48)
    changed = kit.make_model()
    changed.model.model.layers[1].mlp.up_proj.weight.data += 1e-3
    halved = kit.make_model(dtype=torch.float32)
    for model in (other, changed, halved):
        with pytest.raises(UserError, match="made by another model"):
            make_engine(model).submit(None, snapshot=snapshot)


def test_the_fingerprint_is_of_the_model_not_of_its_place(kit, tmp_path):
    model = kit.make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert model_fingerprint(loaded) == model_fingerprint(model)


def test_damage_is_noticed(kit, make_engine, tmp_path):
    file = tmp_path / "state.safetensors"
    replace(make_engine().snapshot(kit.random_tokens(9, 0)), note={"who": "me"}).save(file)
    assert Snapshot.load(file).note == {"who": "me"}
    whole = file.read_bytes()
    place = len(whole) - 100
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(UserError, match="damaged: its checksum"):
        Snapshot.load(file)
    file.write_bytes(whole[:-50])
    with pytest.raises(UserError, match="cannot read the state"):
        Snapshot.load(file)
    file.write_bytes(whole)
    with safe_open(file, framework="pt") as stored:
        metadata = dict(stored.metadata())
    save_file(load_file(file), file, metadata=metadata | {"length": "7"})
    with pytest.raises(UserError, match="damaged"):
        Snapshot.load(file)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="is not a saved state"):
        Snapshot.load(file)
    with pytest.raises(UserError, match="cannot read the state"):
        Snapshot.load(tmp_path / "absent")


def test_writing_is_whole_or_not_at_all(kit, make_engine, tmp_path, monkeypatch):
    file = tmp_path / "state.safetensors"
    snapshot = make_engine().snapshot(kit.random_tokens(9, 0))
    snapshot.save(file)
    before = file.read_bytes()

    def fail(tensors, name, metadata):
        with open(name, "wb") as stream:
            stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("lolcats.generation.snapshot.save_file", fail)
    with pytest.raises(UserError, match="disk full"):
        snapshot.save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]

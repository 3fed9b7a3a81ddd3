"""Slots and the runner: rows that do not take part stay as they are; numbers rounded up for CUDA graphs."""

import gc
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from generation_kit import BOUNDED

from lolcats.errors import UserError
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling.graphs import Graphs


def padded(runner: Runner) -> Runner:
    """Takes rows and keys as for CUDA graphs, and runs eagerly."""
    runner.graphs, runner.prompt_graphs = Graphs(), Graphs()
    runner.graphs.works = runner.prompt_graphs.works = False
    return runner


def test_decoding_with_rows_and_keys_rounded_up(kit, any_model, make_engine):
    prompts = [kit.random_tokens(length, length) for length in (1, 30, 2, 17, 9, 40, 3)]
    engine = make_engine(any_model, max_slots=7, prefill_chunk=4)  # 5 or 6 rows run as 5 or 6, 3 as 4
    padded(engine.runner)
    results = engine.generate(prompts, SamplingParams(max_new_tokens=20))
    assert [result.token_ids for result in results] == [kit.greedy(any_model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize(
    ("attention", "widths"),
    [
        ({"sinks": 1}, {(16, True), (20, False), (32, False), (16, False)}),
        ({"exact": ["0.1", 1]}, {(16, True)}),
        (BOUNDED["attention"], {(16, True)}),
    ],
    ids=["linear", "exact heads", "exact heads with a window"],
)
def test_prompts_with_lengths_rounded_up(kit, attention, widths):
    """As for CUDA graphs: one slot of several, fresh and then, without exact heads, from its state."""
    model = kit.make_model(attention=attention)
    chunks = [kit.random_tokens(length, length) for length in (5, 17, 30, 2, 9)]

    def read(runner):
        logits = [runner.prefill([1], [chunk]) for chunk in chunks]
        return [*logits, *runner.cache.read(1).values()]

    exact, rounded = Runner(model, 3, 64), padded(Runner(model, 3, 64))
    expected = read(exact)
    for found, right in zip(read(rounded), expected, strict=True):
        torch.testing.assert_close(found, right)
    assert rounded._widths == widths
    assert rounded.cache.lengths == exact.cache.lengths == rounded.cache.length_S.tolist()
    assert not any(tensor.any() for slot in (0, 2) for tensor in rounded.cache.read(slot).values())


def test_before_a_capture_nothing_changes(kit, monkeypatch):
    runner = padded(Runner(kit.make_model(), 2, 64))
    runner.prefill([1], [kit.random_tokens(9, 0)])
    before, passes = runner.cache.read(1), []

    def run(key, call, warm_up):
        warm_up()
        passes.append({name: torch.equal(tensor, before[name]) for name, tensor in runner.cache.read(1).items()})
        return call()

    monkeypatch.setattr(runner.prompt_graphs, "run", run)
    for seed in (1, 2):  # captured when it comes again
        runner.prefill([1], [kit.random_tokens(6, seed)])
        before = before if passes else runner.cache.read(1)
    assert len(passes) == 1
    assert all(passes[0].values())


def test_states_stay_at_their_addresses(any_model):
    """What a CUDA graph needs."""
    runner = Runner(any_model, 3, 64)

    def addresses():
        return [buffer.data_ptr() for part in runner.cache.parts.values() for buffer in part.buffers.values()]

    before = addresses()
    runner.prefill([2, 0], [[1], [4]])
    for _ in range(9):
        runner.decode([5, 6])
    runner.cache.move(1, 2)
    runner.cache.clear(0)
    assert addresses() == before


def test_the_model_is_as_before_when_the_runner_is_closed_or_gone(kit, monkeypatch):
    @contextmanager
    def kernels(model, *_):
        model.patched = True
        yield
        del model.patched

    monkeypatch.setattr("lolcats.generation.runner.fused_kernels", kernels)
    model = kit.make_model().train()

    def attributes():
        return {(name, key): x for name, part in model.named_modules() for key, x in vars(part).items()}

    before = attributes()
    gc.collect()  # other tests' runners
    assert torch.backends.cuda.cudnn_sdp_enabled()
    runner = Runner(model, 1)
    runner.prefill([0], [[1, 2, 3]])
    assert model.patched
    assert not model.training
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    runner.close()
    assert attributes() == before
    Runner(model, 1)  # nobody closes it
    assert not hasattr(model, "patched")
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_sizes(kit, model):
    hybrid = kit.make_model(**kit.HYBRID)
    assert Runner(model, 1).max_length is None
    assert Runner(hybrid, 1).max_length == 256  # what the model was made for
    assert Runner(hybrid, 1, max_length=70).max_length == 70
    for settings in ({"max_slots": 0}, {"max_slots": 1, "max_length": 1}):
        with pytest.raises(ValueError, match="expected at least"):
            Runner(model, **settings)
    bounded = kit.make_model(**BOUNDED)
    for length, places in ((None, 7), (70, 7), (6, 6)):  # a window of 5 and 2 sinks
        runner = Runner(bounded, 1, length)
        assert (runner.max_length, runner.cache.places) == (length, places)
    assert Runner(kit.make_model(**kit.CHUNKED), 1, 81).max_length == 80
    with pytest.raises(UserError, match=r"lfm2: .* \(\[0\]\); use the model's own generate"):
        Runner(kit.make_model("lfm2"), 1)


@pytest.mark.parametrize("bits", [None, 8])
def test_windows_of_prompts_in_pieces(kit, bits, without_masks):
    """Slots keep them in a ring; in whichever place a piece begins, its window is the same."""
    model = kit.make_model(**{"attention": BOUNDED["attention"] | {"cache_bits": bits}})
    prompt = kit.random_tokens(61, 0)
    whole, pieces, pair = Runner(model, 1), Runner(model, 1), Runner(model, 2)
    expected = whole.prefill([0], [prompt])
    assert {gap for gap, _ in without_masks} == {False}
    for begin, end in pairwise([0, 1, 6, 9, 20, 37, 61]):
        found = pieces.prefill([0], [prompt[begin:end]])
        both = pair.prefill([0, 1], [prompt[begin:end]] * 2)
    assert {gap for gap, _ in without_masks} == {False, True}
    assert {queries for _, queries in without_masks} == {61, 5, 3, 11, 17, 24}
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(both, expected.expand(2, -1), rtol=2e-4, atol=2e-4)

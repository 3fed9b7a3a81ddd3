"""Sampling: transformers' logits processors are the reference."""

import pytest
import torch
from transformers.generation import logits_process as reference

from lolcats.generation import sampling
from lolcats.generation.sampling import SamplingParams, choose, inverse_cdf, logprobs_of

VOCABULARY = 300
CASES = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.3, "top_p": 0.5, "top_k": 3},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_k": VOCABULARY + 5, "top_p": 0.95},
    {"temperature": 8.0, "top_p": 0.99},  # needs more than the candidates
]


def logits(rows: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return scale * torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' processors make of one row, in the order of its generate()."""
    processors = reference.LogitsProcessorList()
    processors.append(reference.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(reference.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(reference.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(reference.MinPLogitsWarper(params.min_p))
    return processors(torch.zeros(1, 0, dtype=torch.int64), scores[None].clone())[0]


@pytest.mark.parametrize("candidates", [16, 512])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_follow_the_distribution(monkeypatch, case, candidates):
    """Evenly spread random numbers give each token as often as its probability says, to 1 in 4000."""
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    params, row = SamplingParams(**case), logits(1)
    expected = warped(row[0], params).softmax(-1)
    draws = 4000
    uniforms = [(index + 0.5) / draws for index in range(draws)]
    chosen = choose(row.expand(draws, -1), [params] * draws, uniforms)
    counts = torch.bincount(chosen, minlength=VOCABULARY) / draws
    assert float((counts - expected).abs().max()) <= 1.001 / draws


@pytest.mark.parametrize(("dtype", "filters"), [(torch.float32, {}), (torch.bfloat16, {"top_p": 0.9})])
def test_the_smallest_temperatures_take_the_likeliest_token(dtype, filters):
    scores = logits(5, scale=20.0).to(dtype)
    for temperature in (1e-45, 1e-38, 9e-6, 1e-5):
        params = [SamplingParams(temperature=temperature, **filters)] * 5
        assert choose(scores, params, [0.999] * 5).tolist() == scores.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite(bad, temperature):
    scores = logits(3)
    scores[1] = bad
    params = [SamplingParams(temperature=temperature, top_k=4, logprobs=2)] * 3
    tokens = choose(scores, params, [0.5] * 3).tolist()
    assert [token == -1 for token in tokens] == [False, True, False]
    assert [found is None for found in logprobs_of(scores, tokens, params)] == [False, True, False]
    scores[1, :] = 0.0
    scores[1, 5] = torch.nan  # one is enough
    assert choose(scores, params, [0.5] * 3)[1] == -1


def test_the_smallest_and_largest_random_number_take_possible_tokens():
    probability, uniform = torch.tensor([[0, 0.25, 0, 0.75, 0, 0]] * 5), torch.tensor([0, 0.249, 0.25, 0.9, 1.0])
    assert inverse_cdf(probability, uniform[:, None]).flatten().tolist() == [1, 1, 3, 3, 3]


BAD = {
    "max_new_tokens": (0, 10**30),
    "temperature": (-1, 1e300, float("nan")),
    "top_p": (0.0,),
    "top_k": (-1, 10**30, True),
    "stop": (3, ["a", ""], ["a"] * 400_000, "a" * 1000),
    "stop_token_ids": ([-1], [10**30], [1] * 400_000),
    "seed": (1.5,),
    "logprobs": (21,),
    "ignore_eos": (1,),
    "temprature": (1,),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_are_refused_by_name(name):
    for value in BAD[name]:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})

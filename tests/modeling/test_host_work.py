"""What the host does for a layer in `generate`, counted beside transformers' own softmax layer."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.ops.hybrid_attention import eager

pytest.importorskip("triton")
api = importlib.import_module("lolcats.ops.hybrid_attention.api")
launch = importlib.import_module("lolcats.ops.hybrid_attention.kernels.launch")
early_launch = importlib.import_module("lolcats.ops.early_launch")
LAYERS = 2, 4
TOKENS = 20


class Counts(TorchDispatchMode):
    """PyTorch's operations; kernels that were launched again, which compute nothing; functions written in Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.operations = self.launches = self.calls = 0
        for name, value in (
            ("_first_launch", lambda *_: None),
            ("_runner", lambda *_: self.launched),
            ("_plans", eager.Newest()),
            ("INTERPRETED", False),
            ("_stream", lambda device: None),
        ):
            monkeypatch.setattr(launch, name, value)
        monkeypatch.setattr(early_launch, "gdc_wait", None)  # for which a GPU would be asked
        monkeypatch.setattr(api, "_calls", eager.Newest())
        monkeypatch.setattr(api, "has_kernel", lambda backend, q, why_not: why_not() is None)
        monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # calls are as eager as without this

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.operations += 1
        return function(*arguments, **(options or {}))

    def launched(self, *_, stream) -> None:
        self.launches += 1

    def of(self, function) -> torch.Tensor:
        """Operations and launches of one call, and Python's calls of another."""
        self.operations = self.launches = self.calls = 0
        with self:
            function()
        found = [self.operations, self.launches]

        def profile(frame, event, argument):
            self.calls += event == "call"

        sys.setprofile(profile)
        try:
            function()
        finally:
            sys.setprofile(None)
        return torch.tensor([*found, self.calls])


def of_a_layer(
    counts: Counts, attention: AttentionConfig | None, exact: bool = False
) -> tuple[list[float], list[float]]:
    """What `generate` takes for one layer more, of a prompt and of one token after it; `exact`: half of its heads."""
    prompts, steps = [], []
    for layers in LAYERS:
        shape = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()
        if attention is not None and exact:
            attention = replace(attention, exact=tuple(f"{layer}.{layer % 2}" for layer in range(layers)))
        if attention is not None:
            model = convert(model, attention)
        prompt = torch.arange(1, TOKENS + 1)[None]

        def generate(tokens, model=model, prompt=prompt):
            return model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)

        generate(4)
        found = [counts.of(lambda: generate(tokens)) for tokens in (1, 3, 4)]  # noqa: B023
        prompts.append(found[0])
        steps.append(found[2] - found[1])
    more = LAYERS[1] - LAYERS[0]
    return ((prompts[1] - prompts[0]) / more).tolist(), ((steps[1] - steps[0]) / more).tolist()


@pytest.mark.parametrize("settings", [{}, {"linear_length_cap": 2048}], ids=["terraced", "length cap"])
def test_a_layer_takes_little_of_the_host(monkeypatch, settings):
    counts = Counts(monkeypatch)
    softmax = of_a_layer(counts, None)
    hybrid = of_a_layer(counts, AttentionConfig(window_size=8, **settings))
    # What operations there are beyond softmax's, which joins keys to a cache: in a prompt they allocate and make the
    # state; in a step they allocate y and the queries' features.
    check(hybrid, softmax, (13, 3, 120), (-1, 2, 44))


@pytest.mark.parametrize(
    ("settings", "limits"),
    [({}, ((23, 3, 150), (10, 2, 77))), ({"exact_window": 16}, ((40, 3, 170), (16, 2, 82)))],
    ids=["all tokens", "window"],
)
def test_a_layer_with_exact_heads_takes_little_more(monkeypatch, settings, limits):
    counts = Counts(monkeypatch)
    softmax = of_a_layer(counts, None)
    mixed = of_a_layer(counts, AttentionConfig(window_size=8, **settings), exact=True)
    check(mixed, softmax, *limits)


def check(ours: tuple[list[float], ...], theirs: tuple[list[float], ...], *limits: tuple[int, int, int]) -> None:
    """At most so many operations and calls more than softmax, and so many launches: of a prompt, of a token."""
    for (most_operations, launches, most_calls), mine, softmax in zip(limits, ours, theirs, strict=True):
        assert mine[0] - softmax[0] <= most_operations
        assert mine[1] == launches
        assert mine[2] - softmax[2] <= most_calls

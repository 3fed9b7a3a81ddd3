"""What holds for every kind of layer: any split, padding and rows give what each sequence gives alone.

On a CPU in float64, where no sum in another order makes another 8-bit number; on a GPU by the kernels.
"""

import copy
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from lolcats.modeling.cache import AttentionCacheLayer, ExactCacheLayer

WINDOW, SINKS = 5, 2
EXACT = {"window_size": 3, "exact": ["0.1", "1"], "sliding_layers": "linearize"}  # both kinds of heads, and one alone
BOUNDED = {"exact_window": WINDOW, "sinks": SINKS}
CASES = {
    "sliding": ("llama3", {"window": "sliding", "window_size": 3}),
    "terraced": ("llama3", {"window_size": 3, "sinks": 2}),
    "cap": ("llama3", {"window_size": 4, "linear_length_cap": 9}),
    "softmax-layer": ("llama3", {"window_size": 3, "exact": [0]}),
    **{
        f"{family}{'-window' * bounded}{'-8-bits' * packed}": (
            family,
            EXACT | (BOUNDED if bounded else {}) | ({"cache_bits": 8} if packed else {}),
        )
        for family in ("llama3", "gemma3", "gpt-oss", "gemma4-shared-keys")  # native windows, sink logits, shared keys
        for bounded in (False, True)
        for packed in (False, True)
    },
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module", params=CASES)
def model(request, kit, device):
    family, attention = CASES[request.param]
    model = kit.linearized(kit.build(family, head_dim=16), **attention)  # the least that kernels take
    return model.double() if device == "cpu" else model.to(device)


def assert_close(model, found, expected):
    """In float32 a sum in another order may round a key to the next of 127 levels."""
    error = 5e-2 if model.config.attention.cache_bits else 1e-3
    near = {} if found.dtype == torch.float64 else {"rtol": error, "atol": error}
    torch.testing.assert_close(found, expected, **near)


class Sequence:
    """One row: its tokens and the logits of each."""

    def __init__(self):
        self.tokens, self.logits = [], []

    def copy(self):
        other = Sequence()
        other.tokens, other.logits = list(self.tokens), list(self.logits)
        return other


class History:
    """Sequences of a cache that were fed, reordered, repeated and selected at random."""

    def __init__(self, model, kit, chance: random.Random, cache) -> None:
        self.model, self.vocabulary, self.chance, self.cache = model, kit.VOCABULARY, chance, cache
        self.rows = [Sequence() for _ in range(3)]
        self.mask = torch.zeros(3, 0, dtype=torch.int64, device=model.device)

    def feed(self, size: int, padded: bool) -> None:
        real = [self.chance.randint(1, size) if padded else size for _ in self.rows]
        new = torch.stack([torch.arange(size) >= size - count for count in real]).to(self.mask)
        tokens = torch.tensor([[self.chance.randrange(2, self.vocabulary) for _ in range(size)] for _ in self.rows])
        tokens, self.mask = tokens.to(self.mask), torch.cat([self.mask, new], 1)
        given = {} if bool(self.mask.all()) and self.chance.random() < 0.5 else {"attention_mask": self.mask}
        logits = self.model(tokens, past_key_values=self.cache, use_cache=True, **given).logits
        for row, sequence in enumerate(self.rows):
            sequence.tokens += tokens[row, size - real[row] :].tolist()
            sequence.logits += list(logits[row, size - real[row] :])

    def choose_rows(self) -> None:
        kind, count = self.chance.choice(["reorder", "repeat", "select"]), len(self.rows)
        if kind == "repeat" and count < 4:
            chosen = [row for row in range(count) for _ in range(2)]
            self.cache.batch_repeat_interleave(2)
        elif kind == "reorder":
            chosen = [self.chance.randrange(count) for _ in range(count)]
            self.cache.reorder_cache(torch.tensor(chosen))
        else:
            chosen = self.chance.sample(range(count), self.chance.randint(1, count))
            self.cache.batch_select_indices(torch.tensor(chosen))
        self.rows, self.mask = [self.rows[row].copy() for row in chosen], self.mask[chosen]

    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.feed(self.chance.choice([1, 1, 1, 2, 7, 13]), padded=self.chance.random() < 0.3)
            if self.chance.random() < 0.3:
                self.choose_rows()

    def check(self) -> None:
        for sequence in self.rows:
            alone = self.model(torch.tensor([sequence.tokens]).to(self.mask), use_cache=False).logits[0]
            assert_close(self.model, torch.stack(sequence.logits), alone)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(model, kit, seed):
    chance = random.Random(seed)
    history = History(model, kit, chance, DynamicCache(config=model.config.get_text_config()))
    history.run(5)
    other = copy.copy(history)  # goes its own way
    other.cache, other.rows = copy.deepcopy(history.cache), [row.copy() for row in history.rows]
    for each in (other, history):
        each.run(3)
        each.check()
        kept = [getattr(layer, "exact", layer) for layer in each.cache.layers]
        bounded = [layer.places for layer in kept if isinstance(layer, ExactCacheLayer) and layer.sinks]
        assert max(bounded, default=0) <= WINDOW + SINKS
    if all(isinstance(layer, AttentionCacheLayer) for layer in history.cache.layers):
        history.cache.reset()
        again = History(model, kit, chance, history.cache)
        again.run(2)
        again.check()


@torch.no_grad()
def test_packed_documents_equal_each_alone(model, kit):
    """In rows with different borders."""
    tokens, lengths = kit.tokens(2, 30).to(model.device), ([13, 17], [30])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(tokens)
    logits = model(tokens, position_ids=positions, use_cache=False).logits
    for row, sizes in enumerate(lengths):
        alone = [model(part[None], use_cache=False).logits[0] for part in tokens[row].split(sizes)]
        assert_close(model, logits[row], torch.cat(alone))


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, (family, _) in CASES.items() if family == "llama3"])
def test_saved_and_loaded(name, kit, tmp_path, device):
    model = kit.linearized(kit.build("llama3", head_dim=16), **CASES[name][1]).to(device)
    model.save_pretrained(tmp_path)
    loaded, tokens = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device), kit.tokens(1, 20).to(device)
    assert loaded.config.attention == model.config.attention
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)

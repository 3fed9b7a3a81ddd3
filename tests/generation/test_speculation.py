"""Self-speculative decoding: the tokens of the model without a draft, sampled ones in distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from generation_kit import EOS
from transformers import AutoConfig, AutoModelForCausalLM

from lolcats.conversion import keep_softmax
from lolcats.errors import UserError
from lolcats.generation import verification
from lolcats.generation.drafting import Acceptance
from lolcats.generation.engine import Engine
from lolcats.generation.graphs import Graphs
from lolcats.generation.layer_slots import SoftmaxSlots
from lolcats.generation.lookup import Lookup, LookupRounds, Repetitions
from lolcats.generation.runner import Runner
from lolcats.generation.sampling import Chosen, SamplingParams, choose, inverse_cdf
from lolcats.generation.speculation import Draft, Speculation
from lolcats.generation.verification import can_draft, verify

LENGTHS = [1, 2, 17, 30, 7, 3, 50]
DRAFT = Draft(("0.1",), window=4, sinks=1, most=4, adapt=False)
LOOKUP = Lookup(most=4, longest=2, shortest=1, adapt=False)
FAMILIES = {
    "llama": {},
    "gemma2": {
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "head_dim": 8,
    },
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def make_teacher(model_type: str = "llama", dtype: torch.dtype = torch.float32, **changes):
    """An ordinary transformers model whose attention is far from uniform."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    tokens = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **sizes, **tokens, initializer_range=0.2, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            parameter.data *= 4.0
    return model.to(dtype)


@pytest.fixture(scope="module")
def teacher():
    return keep_softmax(make_teacher())


@pytest.fixture
def make_engine(teacher, tokenizer):
    def make(other=None, draft=DRAFT, **settings):
        return Engine(other or teacher, tokenizer, **({"max_slots": 3, "prefill_chunk": 8, "draft": draft} | settings))

    return make


def prompts_of(kit):
    return [kit.random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def answers(kit):
    """By family, what an ordinary model's generate() answers; and the model, wrapped."""
    made = {}

    def of(family):
        if family not in made:
            base = make_teacher(family, **FAMILIES[family])
            expected = [kit.greedy(base, prompt, 20) for prompt in prompts_of(kit)]
            made[family] = keep_softmax(base), expected
        return made[family]

    return of


@pytest.mark.parametrize(
    ("family", "graphs", "draft"),
    [
        ("llama", False, DRAFT),
        ("gemma2", False, DRAFT),
        ("gemma2", True, DRAFT),
        ("gpt_oss", False, DRAFT),
        ("mistral", False, DRAFT),
        ("mistral", True, LOOKUP),
        ("llama", False, LOOKUP),
        ("gemma2", True, LOOKUP),
    ],
)
def test_greedy_tokens_are_the_models_own(kit, make_engine, answers, family, graphs, draft, monkeypatch):
    """Batched, of mixed lengths, beside prompts in prefill, with rejections."""
    model, expected = answers(family)
    rounds = []
    monkeypatch.setattr(Acceptance, "note", lambda self, *counts: rounds.append(counts))
    engine = make_engine(model, draft=draft)
    if graphs:  # rows and keys as CUDA graphs have them
        engine.runner.graphs = Graphs()
        engine.runner.graphs.works = False
    results = engine.generate(prompts_of(kit), SamplingParams(max_new_tokens=20))
    assert [result.token_ids for result in results] == expected
    assert len({tuple(tokens) for tokens in expected}) > 4
    assert engine.counts["free_slots"] == 3
    accepted, tried = (sum(each) for each in zip(*rounds, strict=True))
    if family != "mistral":  # whose layers all have a window, as the draft has
        least = 0.05 if draft is DRAFT else 0.02  # random models seldom repeat themselves
        assert least * tried < accepted < 0.95 * tried


def always_accept(logits_BTV, drafted_BK, *rest):
    return [Chosen(row, [None] * len(row), [None] * len(row)) for row in drafted_BK.tolist()]


FAULTS = {
    "drafts are accepted unseen": lambda patch: patch.setattr("lolcats.generation.scheduler.verify", always_accept),
    "rejected tokens stay": lambda patch: patch.setattr(
        Runner, "keep", lambda self, counts, keep=Runner.keep: keep(self, [5 for _ in counts])
    ),
    "a check sees no window": lambda patch: patch.setattr(
        SoftmaxSlots, "append", lambda self, *args, append=SoftmaxSlots.append: append(self, *args)._replace(reach=None)
    ),
    "a place too early": lambda patch: patch.setattr(
        SoftmaxSlots, "_place", lambda self, position: (position - 1).clamp(min=0)
    ),
}


@pytest.mark.parametrize("draft", [DRAFT, LOOKUP], ids=["own", "lookup"])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rounds_are_found(kit, make_engine, answers, monkeypatch, fault, draft):
    """The wrong variants of the test above."""
    model, expected = answers("gemma2")
    FAULTS[fault](monkeypatch)
    results = make_engine(model, draft=draft).generate(prompts_of(kit), SamplingParams(max_new_tokens=20))
    assert [result.token_ids for result in results] != expected


def test_a_check_is_as_the_model_step_by_step(kit, teacher):
    """Logits of a round, whatever was drafted and rejected before; rows that take no part stay as they are."""
    runner = Runner(teacher, 4, 64, draft=DRAFT)
    prompts = [kit.random_tokens(length, length) for length in (9, 3, 21)]
    runner.prefill([0, 1, 2], prompts)
    before = runner.read(2)
    answers = [[] for _ in range(2)]
    tokens = [1, 2]
    for kept in ([1, 3], [5, 1], [2, 2]):
        drafted_BK, logits_BTV, _ = runner.draft(tokens, 4, [0.0] * 2, [[0.0] * 4] * 2)
        for row, count in enumerate(kept):
            new = [tokens[row], *drafted_BK[row].tolist()]
            whole = torch.tensor([prompts[row] + answers[row] + new])
            expected = teacher(whole, use_cache=False).logits[0, -5:]
            torch.testing.assert_close(logits_BTV[row], expected, rtol=1e-4, atol=1e-4)
            answers[row] += new[:count]
        runner.keep(kept)
        tokens = [7, 8]
    after = runner.read(2)
    assert all(torch.equal(before[name], after[name]) for name in before)


class Chances:
    """A distribution of the model and one of its draft over few tokens; tokens that the draft drew."""

    def __init__(self, params: SamplingParams, rows: int = 6000) -> None:
        generator = torch.Generator().manual_seed(3)
        model, draft = torch.randn(2, 3, 8, generator=generator) * 1.5
        self.each = [params] * rows
        self.logits_BTV, self.draft_BKV = model.expand(rows, -1, -1), draft[:2].expand(rows, -1, -1)
        uniform_BN = torch.rand(rows, 5, generator=generator, dtype=torch.float64)
        q_KV = (draft[:2] / params.temperature).softmax(-1)
        drawn = [inverse_cdf(q_V.expand(rows, -1), uniform_BN[:, column]) for column, q_V in enumerate(q_KV)]
        self.drafted_BK, self.uniforms = torch.stack(drawn, 1), uniform_BN[:, 2:].tolist()
        grid = torch.linspace(0, 1, 4001)[:-1].tolist()  # what the engine samples from, by its own rule
        tokens = [choose(logits_V.expand(4000, -1), [params] * 4000, grid).tokens for logits_V in model]
        self.p_TV = [[Counter(row)[token] / 4000 for token in range(8)] for row in tokens]

    def look_up(self, *tokens: int) -> Chances:
        """These tokens as the draft of all rows, which no draw decided."""
        self.drafted_BK, self.draft_BKV = torch.tensor(tokens).expand(len(self.each), -1), None
        return self

    def tokens(self) -> list[list[int]]:
        found = verify(self.logits_BTV, self.drafted_BK, self.draft_BKV, self.each, self.uniforms)
        return [row.tokens for row in found]

    def distance(self) -> float:
        """The largest difference between shares of tokens and the model's own chances, in standard deviations."""
        found, worst = self.tokens(), 0.0
        for column, p_V in enumerate(self.p_TV):
            drawn = Counter(row[column] for row in found if len(row) > column)
            for token, p in enumerate(p_V):
                deviation = max((p * (1 - p) / drawn.total()) ** 0.5, 1e-3)
                worst = max(worst, abs(drawn[token] / drawn.total() - p) / deviation)
        return worst


SAMPLING = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.3, top_k=3),
    "top-p, min-p": SamplingParams(temperature=1.0, top_p=0.7, min_p=0.05),
}


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
def test_sampled_tokens_are_distributed_as_the_models(params):
    chances = Chances(params)
    assert chances.distance() < 4.5  # 24 shares
    lengths = Counter(map(len, chances.tokens()))
    assert all(lengths[count] > 300 for count in (1, 2, 3))


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
def test_sampled_tokens_after_a_lookup_are_distributed_as_the_models(params, monkeypatch):
    chances = Chances(params)
    likely = [max(range(8), key=p_V.__getitem__) for p_V in chances.p_TV]
    chances.look_up(*likely[:2])
    assert chances.distance() < 4.5
    monkeypatch.setattr(verification, "residual", lambda p, q: p)  # a rejected token may come again
    assert chances.distance() > 6


def test_what_stands_behind_a_limit_does_not_count():
    """Of greedy and sampled rows: the first tokens of a round without a limit, whatever the later logits are."""
    chances = Chances(SAMPLING["temperature"]).look_up(1, 2)
    chances.each[::2] = [SamplingParams(temperature=0.0)] * (len(chances.each) // 2)
    expected = chances.tokens()
    assert {len(row) for row in expected} == {1, 2, 3}
    chances.logits_BTV = chances.logits_BTV.clone()
    chances.logits_BTV[:, 2] = torch.nan
    rest = (None, chances.each, chances.uniforms)
    for limits in ([2] * len(expected), [1, 2] * (len(expected) // 2)):
        found = verify(chances.logits_BTV, chances.drafted_BK, *rest, limits=limits)
        assert [row.tokens for row in found] == [row[:most] for row, most in zip(expected, limits, strict=True)]
    assert chances.tokens() != expected  # without limits


def no_filters(scores_NV, params):
    return torch.sort(scores_NV, -1, descending=True)


RULES = {  # a name in the module, and what a wrong rule has in its place
    "drafts are always accepted": ("draft_probabilities", lambda of: lambda *args: of(*args) * 0),
    "the model's distribution in place of what is left": ("residual", lambda of: lambda p, q: p),
    "a draft of another temperature": ("draft_probabilities", lambda of: lambda logits, scale: of(logits, scale * 2)),
    "filters are forgotten": ("keep_likely", lambda of: no_filters),
}


@pytest.mark.parametrize("rule", RULES)
def test_wrong_rules_are_found(monkeypatch, rule):
    """The wrong variants of the test above."""
    chances = Chances(SAMPLING["top-k" if "filters" in rule else "temperature"])
    name, wrong = RULES[rule]
    monkeypatch.setattr(verification, name, wrong(getattr(verification, name)))
    assert chances.distance() > 6


def test_sampled_answers_are_distributed_as_without_a_draft(kit, make_engine):
    """End to end: shares of the first two tokens after a prompt's first."""
    params = [
        SamplingParams(temperature=1.0, top_k=3, max_new_tokens=3, ignore_eos=True, seed=seed) for seed in range(120)
    ]
    prompt, shares = kit.random_tokens(12, 1), []
    for draft in (None, Draft(window=4, sinks=1, most=2, adapt=False), LOOKUP):
        results = make_engine(draft=draft, max_slots=60).generate([prompt] * len(params), params)
        shares.append(Counter(tuple(result.token_ids[:2]) for result in results))
    assert len(shares[0]) > 3
    for other in shares[1:]:
        for pair in shares[0] | other:
            p = (shares[0][pair] + other[pair]) / 240
            assert abs(shares[0][pair] - other[pair]) / 120 < 4.5 * (2 * p * (1 - p) / 120) ** 0.5


@pytest.mark.parametrize("draft", [DRAFT, LOOKUP], ids=["own", "lookup"])
def test_what_ends_an_answer_and_what_comes_with_it(kit, teacher, make_engine, draft):
    """Limits, stop tokens and strings, log-probabilities, penalties, snapshots and cancelling, beside one another."""
    engine, plain = make_engine(draft=draft), make_engine(draft=None)
    prompt = kit.random_tokens(9, 0)
    free = plain.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
    settings = [
        {"max_new_tokens": 6},
        {"stop_token_ids": [free.token_ids[4]]},
        {"stop": free.text[8:11]},
        {"logprobs": 2},
        {"repetition_penalty": 1.7, "presence_penalty": 0.5},
        {"repetition_penalty": 1.2, "logprobs": 0, "temperature": 0.9, "seed": 3},
    ]
    params = [SamplingParams(**({"max_new_tokens": 40, "ignore_eos": True} | item)) for item in settings]
    found, expected = engine.generate([prompt] * 6, params), plain.generate([prompt] * 6, params)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.text, one.finish_reason, one.stop) == (
            other.token_ids,
            other.text,
            other.finish_reason,
            other.stop,
        )
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)
        assert [[token for token, _ in top] for top in one.top_logprobs] == [
            [token for token, _ in top] for top in other.top_logprobs
        ]
    kept = engine.submit(prompt, SamplingParams(max_new_tokens=7, ignore_eos=True), keep_state=True).result()
    assert kept.snapshot.length == len(kept.snapshot.token_ids) - 1 == 15
    more = engine.submit(None, SamplingParams(max_new_tokens=33, ignore_eos=True), snapshot=kept.snapshot).result()
    assert kept.token_ids + more.token_ids == free.token_ids
    handle = engine.submit(prompt, SamplingParams(max_new_tokens=200, ignore_eos=True))
    pieces = iter(handle)
    text = next(pieces)
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"
    assert handle.result().text.startswith(text)
    assert engine.counts["free_slots"] == 3


def test_answers_reach_the_last_place(kit, make_engine):
    """Drafts beyond a sequence's end have places of their own."""
    prompt = kit.random_tokens(20, 0)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    found = make_engine(max_length=32).generate([prompt] * 3, params)
    assert found[0].token_ids == make_engine(max_length=60, draft=None).generate([prompt], params)[0].token_ids
    assert len({tuple(result.token_ids) for result in found}) == 1


def test_where_drafts_are_looked_up():
    """Behind the latest place where the last tokens stood, more of them first."""
    found, settings = Repetitions(), Lookup(most=3)
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7]
    assert found.draft(tokens, settings) == []
    assert found.draft([*tokens, 2, 3], settings) == [5, 6, 7]
    assert found.draft([*tokens, 2, 3, 1], settings) == []
    assert found.draft([*tokens, 2, 3, 1, 2, 3], settings) == [4, 9, 2]  # three tokens say more than two later ones
    with pytest.raises(ValueError, match="shortest <= longest"):
        Lookup(longest=1)


def test_how_many_looked_up_tokens_to_check(teacher):
    """As many as pay: fewer where they are rejected, few or none in a batch whose products take long."""
    rounds, draft = LookupRounds(teacher, Lookup()), [5] * 8
    rounds.costs.round = rounds.costs.latency = 0
    rounds.costs.flop, rounds.costs.weights, rounds.costs.flop_per_byte = 100, 400, 1.0
    assert rounds.tokens([draft], [0.9], [1]) > rounds.tokens([draft], [0.5], [1]) > 0
    assert rounds.tokens([draft[:2]], [0.99], [1]) == 2
    assert rounds.tokens([[]], [0.9], [1]) == 0
    assert rounds.tokens([draft, *[[]] * 7], [0.9] * 8, [1] * 8) == 0
    assert LookupRounds(teacher, LOOKUP).tokens([draft[:3], [], []], [0.0] * 3, [1] * 3) == 4


def test_how_many_tokens_to_draft(teacher):
    """The more the cache weighs and the more is accepted, the more; none where none is."""
    paced = Speculation(teacher, Draft(window=4, sinks=1, most=8))
    costs = paced.costs
    costs.weights, costs.latency, costs.flop, costs.round = 10 * 512, 0, 0, 0
    assert paced.tokens([10], 1) < paced.tokens([100], 1) <= paced.tokens([10**4], 1)
    assert paced.tokens([10**5], 1) == 8
    assert paced.tokens([10**5], 0) == 0
    costs.latency = 100 * 512  # of a small model's pass, which a draft does not spare
    assert paced.tokens([10], 1) == 0
    costs.round = 10**4 * 512  # of a round, which it does
    assert paced.tokens([10], 1) == 8
    costs.latency = costs.round = 0
    costs.flop = 10**8  # a check of many tokens takes as long as its products
    assert paced.tokens([100] * 64, 64) == 0
    costs.flop = 0
    for _ in range(60):
        paced.acceptance.note(1, 10)
    assert paced.tokens([10**5], 1) < 8
    for _ in range(60):
        paced.acceptance.note(0, 10)
    assert paced.tokens([100], 1) == 0
    for _ in range(200):  # steps without a draft: it is tried again
        paced.acceptance.note(0, 0)
    assert paced.tokens([10**5], 1) > 1
    assert not can_draft(SamplingParams(frequency_penalty=0.1))


def test_drafts_that_do_not_fit(kit, model, teacher, tmp_path):
    with pytest.raises(UserError, match="this one has linear heads"):
        Runner(model, 2, draft=DRAFT)
    sliding = kit.make_model(attention={"window": "sliding", "window_size": 5})
    with pytest.raises(UserError, match="linear heads with a sliding window of 5 tokens take no token back"):
        Runner(sliding, 2, draft=LOOKUP)
    with pytest.raises(UserError, match=r"exact=0.2: layer 0 of the model has the KV heads 0 to 1"):
        Runner(teacher, 2, draft=Draft(("0.2",)))
    with pytest.raises(UserError, match=r"exact=7: the model has attention in the layers 0 to 1"):
        Runner(teacher, 2, draft=Draft(("7",)))
    with pytest.raises(UserError, match=r"exact='7.x': expected a KV head"):
        Draft.read("7.x")
    with pytest.raises(UserError, match=r"12% is a budget"):
        Draft.read("12%")
    with pytest.raises(UserError, match="is no folder"):
        Draft.read(tmp_path / "nothing")
    with pytest.raises(ValueError, match="window=0"):
        Draft(window=0)
    kit.make_model(attention={"exact": ["0.1", "1.0"]}).save_pretrained(tmp_path)
    assert Draft.read(tmp_path) == Draft(("0.1", "1.0")) == Draft.read("0.1, 1.0")
    whole, apart = (Speculation(teacher, Draft(names)).draft.reach for names in (("0-1",), ("0.0", "0.1", "1")))
    assert whole == apart == {}  # every head reads everything
    assert Draft.read("window") == Draft()
    make_teacher().save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="holds a llama model; expected a linearized one"):
        Draft.read(tmp_path / "plain")


def test_random_numbers_of_a_round(kit, make_engine):
    """The same seed gives the same tokens."""
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=20)
    first, second = (make_engine().generate([kit.random_tokens(9, 1)], params)[0].token_ids for _ in range(2))
    assert first == second

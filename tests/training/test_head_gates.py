"""Gates between softmax and hybrid attention, and the heads that they choose."""

import io
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from family_models import randomised
from rich.console import Console
from transformers import AutoModelForCausalLM

from lolcats.config import GatesSection
from lolcats.errors import UserError
from lolcats.modeling.attention import AttentionCall
from lolcats.modeling.cache_size import heads_in_budget
from lolcats.training.head_gates import GateStage, by_gate, far_length, settle
from lolcats.training.loop import Trainer, train


@pytest.fixture
def gate_stage(linearized):
    def build(device="cpu", **section):
        model, data, validation = linearized(loss_on="all")
        torch.manual_seed(5)
        settings = {"batch_size": 2, "micro_batch_size": 2, "max_steps": 12, "eval_every": 12, **section}
        return GateStage(randomised(model, 1.0).to(device), GatesSection(**settings), validation), data

    return build


def test_open_gates_are_the_teacher(gate_stage):
    stage, _ = gate_stage(penalty=2.0)
    found = stage.evaluate()
    assert found["divergence"] == pytest.approx(0, abs=1e-5)
    assert (found["loss"], found["mean_gate"]) == (pytest.approx(2.0, abs=1e-5), 1.0)
    for gate in stage.gates.values():
        gate.data.zero_()
    assert stage.evaluate()["divergence"] > 0.01


def test_a_penalty_closes_gates_and_the_divergence_keeps_them_open(gate_stage, tmp_path):
    values = {}
    for penalty in (0.0, 100.0):
        stage, data = gate_stage(penalty=penalty, lr=0.2)
        result = train(stage, data, stage.config, seed=0, directory=tmp_path / str(penalty))
        values[penalty] = sum(gate.clamp(0, 1).sum().item() for gate in stage.gates.values()) / 4
        assert all(0 <= gate <= 1 for row in stage.values().values() for gate in row)
        assert result.history[-1]["mean_gate"] == pytest.approx(values[penalty])
    assert values[0.0] > 0.9
    assert values[100.0] < 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_gates_are_trained(gate_stage, checkpointing):
    stage, data = gate_stage(gradient_checkpointing=checkpointing)
    for gate in stage.gates.values():
        gate.data.fill_(0.5)
    stage.micro_step(data.batch([0, 1]), scale=1.0)
    gradients = {name: p.grad.clone() for name, p in stage.blocks()[0].items() if p.grad is not None}
    assert list(gradients) == [f"layers.{index}.gates" for index in stage.gates]
    assert all(gradient.abs().min() > 0 for gradient in gradients.values())
    assert all(parameter.grad is None for parameter in stage.model.parameters())
    if checkpointing:
        assert stage.model.is_gradient_checkpointing
        stage.close()
        assert not stage.model.is_gradient_checkpointing
        plain, _ = gate_stage()
        for gate in plain.gates.values():
            gate.data.fill_(0.5)
        plain.micro_step(data.batch([0, 1]), scale=1.0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.blocks()[0][name].grad, rtol=1e-4, atol=1e-6)  # recomputed sums


@pytest.mark.gpu
def test_graphs_equal_plain_steps(gate_stage):
    (stage, data), (plain, _) = gate_stage(device="cuda"), gate_stage(device="cuda", cuda_graphs="off")
    for rows in ([0, 1], [2, 3]) * 4:
        for each in (stage, plain):
            each.found = each.micro_step(data.batch(rows), 0.5), each.evaluate()
            each.gradients = [gate.grad for gate in each.gates.values()]
            for gate in each.gates.values():
                gate.data.mul_(0.9)
                gate.grad = None
        torch.testing.assert_close(stage.found, plain.found, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stage.gradients, plain.gradients, rtol=1e-3, atol=1e-5)
    assert len(stage.graphs._captured) == 3  # updates, evaluations, and their smaller last batch


def test_of_closed_gates_the_one_that_closed_last_comes_first(gate_stage):
    stage, data = gate_stage(penalty=0.0)
    (_, gate), *_ = stage.gates.items()
    for step in range(4):
        gate.data[0] = 0.0
        gate.data[1] = float(step < 2)
        gate.grad = None  # as after an update
        stage.micro_step(data.batch([0, 1]), scale=1.0)
    first, second = next(iter(stage.values().values()))[:2]
    assert 0 < first < second < 1


@pytest.mark.parametrize("tokens", ["some", "one sequence's"])
def test_micro_batches_do_not_change_the_gates(gate_stage, tokens):
    """Of sequences with 40, 3, 1 and 0 labels, say."""
    found = {}
    for micro in (4, 2, 1):
        stage, data = gate_stage(batch_size=4, micro_batch_size=micro, penalty=0.5)
        masks = [np.zeros_like(data.label_mask), np.zeros_like(stage.validation.label_mask)]
        for mask in masks:
            for row in range(len(mask)):
                mask[row, 1 : 1 + (40, 3, 1, 0)[row % 4] if tokens == "some" or row % 4 == 0 else 1] = True
        data = replace(data, label_mask=masks[0])
        stage.validation = replace(stage.validation, label_mask=masks[1])
        for gate in stage.gates.values():
            gate.data.fill_(0.5)
        trainer = Trainer(stage, data, stage.config, 0)
        trainer.sampler.indices = lambda step: np.arange(4)
        trainer.blocks, trainer.read = [], lambda: None  # gradients stay
        trainer.update()
        gradients = [gate.grad for gate in stage.gates.values()]
        averages = [x.detach() for x in stage.averages.values()]
        found[micro] = gradients, averages, stage.evaluate()
    assert all(gradient.abs().min() > 0 for gradient in found[4][0])
    for micro in (2, 1):
        torch.testing.assert_close(found[micro], found[4], rtol=1e-4, atol=1e-6)


def test_the_largest_gates_come_first():
    gates = {0: [0.1, 0.9], 3: [0.9, 1.0], 4: [0.0, 0.2]}
    assert by_gate(gates) == [(3, 1), (0, 1), (3, 0), (4, 1), (0, 0), (4, 0)]  # of equal ones the earlier layer's


def test_the_cost_of_a_head_is_the_divergence_without_it(gate_stage):
    stage, _ = gate_stage()
    heads = [(index, head) for index, gate in stage.gates.items() for head in range(len(gate))]
    kept, left_out = heads[:3], heads[1:3]
    found = stage.costs(kept, left_out, stage.validation)
    for out, cost in zip(left_out, found, strict=True):
        for index, gate in stage.gates.items():
            gate.data = torch.tensor([float((index, head) in kept and (index, head) != out) for head in (0, 1)])
        assert stage.evaluate()["divergence"] == pytest.approx(cost, rel=1e-5)
    assert found[0] != pytest.approx(found[1], rel=1e-2)


def test_longer_texts_settle_who_is_next_to_the_border():
    ranked = [(layer, 0) for layer in range(12)]

    def costs(kept, left_out):
        assert (kept, left_out) == (ranked[:10], ranked[6:10])  # a quarter of eight, on either side
        return [0.1, 0.4, 0.2, 0.3]

    settled, found = settle(ranked, 8, costs)
    assert [layer for layer, _ in settled] == [0, 1, 2, 3, 4, 5, 7, 9, 8, 6, 10, 11]
    assert found[9, 0] == 0.3
    assert settle(ranked, 1, lambda kept, left_out: [0.0, 1.0])[0][:3] == [ranked[1], ranked[0], ranked[2]]
    assert settle(ranked, 12, lambda kept, left_out: [1.0] * len(left_out))[0] == ranked


def test_where_longer_texts_cannot_decide_gates_do(run, haystack, tmp_path, monkeypatch):
    stage = {"max_steps": 2, "batch_size": 2, "micro_batch_size": 2, "eval_every": 2}
    short = tmp_path / "short.txt"
    short.write_text("\n\n".join(f"w{n % 60} w{n * 7 % 60}" for n in range(600)))
    section = GatesSection(sequence_length=512)
    assert [far_length(section, positions) for positions in (512, 1000, 1024, 10_000)] == [0, 0, 1024, 2048]

    def choose(name, text):
        stages = {"transfer": stage, "gates": stage | {"haystack": text, "sequence_length": 512}, "adjust": stage}
        printed = io.StringIO()
        console = Console(file=printed, width=200)
        found = run(tmp_path / name, stages, {"attention": {"exact": "50%"}}, console=console)["gates"]
        largest = sorted((-gate, layer) for layer, gates in found["values"].items() for gate in gates)[:2]
        assert sorted(layer for _, layer in largest) == sorted(x for x, heads in found["chosen"].items() for _ in heads)
        assert found["far"] == {}
        return printed.getvalue()

    monkeypatch.setattr("lolcats.pipeline.positions_of", lambda base: 2048)
    assert "gates alone: no texts of 2048 tokens: the haystack has" in choose("short", str(short))
    monkeypatch.setattr(GateStage, "costs", Mock(side_effect=torch.OutOfMemoryError))
    assert "gates alone: out of memory in texts of 2048 tokens" in choose("full", haystack)


def test_budgets(linearized):
    config = linearized()[0].config  # 2 layers of 2 KV heads of 8
    refused = {
        "99%": "all 4 KV heads",
        "9GiB@100": "all 4",
        "0%": "none of 4",
        "1KiB@4096": "without exact heads takes",
    }
    for budget, message in refused.items():
        with pytest.raises(UserError, match=message):
            heads_in_budget(config, budget, torch.float32)


def test_heads_made_exact_later_equal_those_converted_so(linearized):
    """And the feature maps of the others stay as they are."""
    model = randomised(linearized()[0].eval())
    ids = torch.arange(2, 32)[None]
    gates = {0: torch.tensor([1.0, 0.0]), 1: torch.tensor([1.0, 1.0])}
    with torch.no_grad():
        expected = model(ids, attention_call=AttentionCall(gates=gates), use_cache=False).logits
        model.set_exact({0: [0], 1: [1]})
        model.set_exact({1: [0]})
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert model.config.exact_heads == ["0.0", "1"] == list(model.config.attention.exact)


def test_linearize_spends_a_budget_and_resumes(run, haystack, tmp_path, monkeypatch):
    monkeypatch.setattr("lolcats.pipeline.positions_of", lambda base: 1024)  # texts of so many settle the border
    stage = {"max_steps": 2, "batch_size": 2, "micro_batch_size": 2, "eval_every": 2}
    stages = {"transfer": stage, "gates": stage | {"haystack": haystack, "sequence_length": 512}, "adjust": stage}

    def spend(name, budget, **options):
        return run(tmp_path / name, stages, {"attention": {"exact": budget}}, **options)

    report = spend("out", "50%")
    chosen = report["gates"]["chosen"]
    assert sum(map(len, chosen.values())) == 2
    far = report["gates"]["far"]
    kept = {head: int(head[2]) in chosen.get(int(head[0]), []) for head in far}
    assert sorted(kept.values()) == [False, True]  # one on either side of the border
    assert kept[max(far, key=far.get)]
    assert list(report["perplexity"]) == ["teacher", "swapped", "transfer", "gates", "adjust"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {layer.index: list(layer.exact) for layer in model.config.layer_heads if layer.exact} == chosen
    assert list(model.config.attention.exact) == report["exact_heads"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A partly linear version" in card
    assert f"{report['cache']['bytes'] / 2**20:.1f} MiB" in card
    with monkeypatch.context() as patch:
        patch.delattr(GateStage, "costs")  # which are not measured again
        again = spend("out", "50%", resume=True)
    assert again["perplexity"] == report["perplexity"]
    assert again["gates"] == report["gates"]
    # the gates do not depend on the budget, and stage 1 neither
    smaller = spend("other", "25%", transfer_from=tmp_path / "out")
    assert smaller["perplexity"]["transfer"] == report["perplexity"]["transfer"]
    assert smaller["stages"]["gates"] == report["stages"]["gates"]  # taken, not learned again: the seconds are the same
    assert smaller["gates"]["values"] == report["gates"]["values"]
    assert len(smaller["exact_heads"]) == 1
    missing = {"data": {"sources": [{"path": "missing.jsonl"}]}}
    with pytest.raises(UserError, match="all 4 KV heads"):
        run(tmp_path / "every", stages, missing, {"attention": {"exact": "99%"}})
    assert not (tmp_path / "every").exists()  # refused before data are read

"""What exact heads should keep once they may not keep all: rules of admission on one trained model.

    python benchmarks/admission.py --model FOLDER --haystack wikipedia.jsonl.gz --tokens 1253 --json FILE

Each exact head of a linearized model reads its text in blocks of 64 tokens. What it keeps behind a block are its first
token, its `recent` last ones and, of all others, those that a rule puts first, `tokens` in all; so that a text read
in pieces keeps the same. Rules: the last tokens; attention received since (sum, as H2O, arXiv:2306.14048; mean; a
decaying sum, near SnapKV, arXiv:2404.14469); attention of the newest query (TOVA, arXiv:2401.06104); a network
of one hidden layer that predicts from key and value whether a token will be looked up from far away, trained on texts
of another split and haystack (as in KVzip, arXiv:2505.23416); chance. `reach` keeps the last tokens, but not as many in
each head: more where training texts look back further.

Measured: recall in a haystack of natural text (`lolcats.evaluation.recall`) and perplexity of the second half of
pieces of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_tools import main, settings_json
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import lolcats.modeling.attention as attention_module
from lolcats.data.packed import PackedDataset
from lolcats.data.retrieval import RetrievalWriter
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.evaluation.recall import recall_accuracy
from lolcats.provenance import provenance

BLOCK = 64
DECAY = 0.9  # of the decaying sum, a block
GONE = 2**30  # a place that no query sees
RULES = ("all", "last", "reach", "sum", "mean", "decaying", "newest", "predicted", "chance")


@dataclass(frozen=True)
class AdmissionBench:
    """What to measure."""

    model: str = ""
    haystack: str = "demo"
    rules: tuple[str, ...] = RULES
    tokens: tuple[int, ...] = (1253,)  # that an exact head keeps
    recent: int = 256
    kinds: tuple[str, ...] = ("needle", "needles", "copy_900")
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    samples: int = 50
    pieces: int = 24  # of text, for perplexity
    training_texts: int = 16  # for `predicted` and `reach`
    training_length: int = 4096
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0


def run(bench: AdmissionBench, console: Console, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A row for each rule and number of tokens."""
    if unknown := set(bench.rules) - set(RULES):
        raise UserError(f"--rules: {', '.join(unknown)}; there are {', '.join(RULES)}")
    model, tokenizer = load_model(bench.model, dtype=bench.dtype, device=bench.device)
    report: dict[str, Any] = {"settings": settings_json(bench), "provenance": provenance(), "rows": []}
    keep(report)
    heads = ExactHeads(model)
    if {"predicted", "reach"} & set(bench.rules):
        heads.learn(RetrievalWriter(tokenizer, "train", "demo", begin_token=True), bench)
    for tokens in bench.tokens:
        for rule in bench.rules:
            with heads.keeping(rule, tokens, bench.recent):
                row = {"rule": rule, "tokens": tokens, **measured(model, tokenizer, bench)}
            report["rows"].append(row)
            keep(report)
            console.print(str(row), highlight=False, markup=False, soft_wrap=True)
    return report


@torch.no_grad()
def measured(model: Any, tokenizer: Any, bench: AdmissionBench) -> dict[str, Any]:
    """Recall by kind and length, and perplexity of text."""
    settings = {"kinds": bench.kinds, "lengths": bench.lengths, "samples": bench.samples, "seed": bench.seed}
    recall = recall_accuracy(model, tokenizer, haystack=bench.haystack, **settings)
    writer, longest = RetrievalWriter(tokenizer, "test", bench.haystack, begin_token=True), max(bench.lengths)
    draw = np.random.default_rng(bench.seed)
    ids_NT = np.stack([writer.write_text(longest, draw) for _ in range(bench.pieces)])
    is_label_NT = np.broadcast_to(np.arange(longest) > longest // 2, ids_NT.shape)
    text = PackedDataset(ids_NT, is_label_NT, info={})
    return {"recall": recall, "perplexity": dataset_perplexity(model, text, batch_size=1)["perplexity"]}


class ExactHeads:
    """The exact heads of a linearized model, whose softmax attention it replaces."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = sorted({int(head.split(".")[0]) for head in model.config.exact_heads})
        self.predictors: dict[int, Predictor] = {}
        self.reach: dict[int, Tensor] = {}
        """By layer: the mean distance of its heads' attention, [G]."""
        self.rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))

    @contextmanager
    def calling(self, attend: Callable[..., Tensor]) -> Iterator[None]:
        """`attend(layer, q, k, v, scale)` in the place of the exact heads' attention; layers come in their order."""
        calls, original = 0, attention_module.softmax_attention

        def replaced(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **rest: Any) -> Tensor:
            nonlocal calls
            layer = self.layers[calls % len(self.layers)]
            calls += 1
            return attend(layer, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)

        attention_module.softmax_attention = replaced
        try:
            yield
        finally:
            attention_module.softmax_attention = original

    @contextmanager
    def keeping(self, rule: str, tokens: int, recent: int) -> Iterator[None]:
        if rule == "all":
            yield
            return

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            predicted = self.predictors[layer](self.unrotated(k), v) if rule == "predicted" else None
            budgets = [tokens] * k.shape[1]
            if rule == "reach":
                mean = torch.cat(list(self.reach.values())).mean()
                budgets = [max(recent + 1, round(tokens * share)) for share in (self.reach[layer] / mean).tolist()]
            return bounded_attention(q, k, v, scale, budgets, recent, rule, predicted)

        with self.calling(attend):
            yield

    def unrotated(self, k_BGTD: Tensor) -> Tensor:
        """Keys without their rotary embedding."""
        places = torch.arange(k_BGTD.shape[2], device=k_BGTD.device)[None]
        cos, sin = (x[:, None].float() for x in self.rotary(k_BGTD, places))
        first, second = k_BGTD.float().chunk(2, -1)
        return k_BGTD.float() * cos + torch.cat((second, -first), -1) * sin

    def learn(self, writer: RetrievalWriter, bench: AdmissionBench) -> None:
        """Predictors and reach, from training texts."""
        seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {layer: [] for layer in self.layers}
        distance: dict[int, list[Tensor]] = {layer: [] for layer in self.layers}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            y, most_BGT, distance_G = looked_up(q, k, v, scale, bench.recent)
            seen[layer].append((self.unrotated(k).cpu(), v.float().cpu(), most_BGT.cpu()))
            distance[layer].append(distance_G)
            return y

        with torch.no_grad(), self.calling(attend):
            for index in range(bench.training_texts):
                ids = writer.write_any(bench.training_length, bench.seed, index).token_ids
                self.model(input_ids=torch.from_numpy(ids).long()[None].to(self.model.device), use_cache=False)
        torch.manual_seed(bench.seed)
        for layer in self.layers:
            self.reach[layer] = torch.stack(distance[layer]).mean(0)
            k, v, most = (torch.cat(parts).to(self.model.device) for parts in zip(*seen[layer], strict=True))
            self.predictors[layer] = Predictor(k.shape[1], k.shape[-1]).to(k.device).fit(k, v, most)


class Predictor(nn.Module):
    """How much a token will be looked at from far away, by its key and value: a network for each head."""

    def __init__(self, heads: int, size: int, hidden: int = 64) -> None:
        super().__init__()
        self.inward = nn.Parameter(torch.randn(heads, 2 * size, hidden) / math.sqrt(2 * size))
        self.bias = nn.Parameter(torch.zeros(heads, 1, hidden))
        self.outward = nn.Parameter(torch.randn(heads, hidden, 1) / math.sqrt(hidden))

    def forward(self, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        """[B, G, T], the logarithm of the weight."""
        x_BGTE = torch.cat((k_BGTD.float(), v_BGTD.float()), -1)
        x_BGTE = (x_BGTE - x_BGTE.mean(-1, keepdim=True)) / x_BGTE.std(-1, keepdim=True)
        return (nn.functional.gelu(x_BGTE @ self.inward + self.bias) @ self.outward).squeeze(-1)

    @torch.enable_grad()
    def fit(self, k: Tensor, v: Tensor, most: Tensor, steps: int = 400) -> Predictor:
        target = (most + 1e-4).log()
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        for _ in range(steps):
            rows = torch.randint(len(k), (4,), device=k.device)
            loss = (self(k[rows], v[rows]) - target[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return self.requires_grad_(False)


def looked_up(q: Tensor, k: Tensor, v: Tensor, scale: float, recent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention; each key's largest weight in queries more than `recent` after it, [B, G, T]; the mean
    distance of attention, [G]."""
    q_BGRTD, tokens = q.unflatten(1, (k.shape[1], -1)).float(), q.shape[2]
    places = torch.arange(tokens, device=q.device)
    most, distance, outputs = torch.zeros(k.shape[:3], device=q.device), torch.zeros(k.shape[1], device=q.device), []
    for begin in range(0, tokens, 4 * BLOCK):
        end = min(begin + 4 * BLOCK, tokens)
        back = places[begin:end, None] - places[None, :end]
        scores = torch.einsum("bgrtd,bgsd->bgrts", q_BGRTD[..., begin:end, :], k[:, :, :end].float()) * scale
        weights = scores.masked_fill(back < 0, -math.inf).softmax(-1)
        outputs.append(torch.einsum("bgrts,bgsd->bgrtd", weights, v[:, :, :end].float()))
        far = weights.masked_fill(back < recent, 0.0).amax((2, 3))
        most[:, :, :end] = torch.maximum(most[:, :, :end], far)
        distance += (weights * back.clamp_min(0)).sum((0, 2, 3, 4)) / (len(q) * q_BGRTD.shape[2] * tokens)
    return torch.cat(outputs, 3).flatten(1, 2).to(q.dtype), most, distance


def bounded_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, budgets: list[int], recent: int, rule: str, predicted: Tensor | None
) -> Tensor:
    """Softmax attention [B, H, T, D] over what each KV head keeps: its own number of tokens, chosen by `rule`."""
    batch, heads, tokens, _ = k.shape
    q_BGRTD = q.unflatten(1, (heads, -1)).float()
    most = max(budgets)
    budget_G1 = torch.tensor(budgets, device=q.device)[:, None]
    place = torch.empty(batch, heads, 0, dtype=torch.long, device=q.device)
    total, decaying = (torch.zeros(batch, heads, 0, device=q.device) for _ in range(2))
    outputs = []
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        new = torch.arange(begin, end, device=q.device)
        place = torch.cat((place, new.expand(batch, heads, -1)), -1)
        total, decaying = (nn.functional.pad(x, (0, end - begin)) for x in (total, decaying))
        index = place.clamp_max(tokens - 1)[..., None].expand(-1, -1, -1, k.shape[-1])
        keys, values = k.gather(2, index).float(), v.gather(2, index).float()
        scores = torch.einsum("bgrtd,bgsd->bgrts", q_BGRTD[..., begin:end, :], keys) * scale
        hidden = place[:, :, None] > new[:, None]
        weights = scores.masked_fill(hidden[:, :, None], -math.inf).softmax(-1)
        outputs.append(torch.einsum("bgrts,bgsd->bgrtd", weights, values))
        received = weights.sum((2, 3))
        total, decaying = total + received, DECAY * decaying + received
        if place.shape[-1] <= min(budgets):
            continue
        if rule == "sum":
            worth = total
        elif rule == "mean":
            worth = total / (end - place).clamp_min(1)
        elif rule == "decaying":
            worth = decaying
        elif rule == "newest":
            worth = weights[..., -1, :].sum(2)
        elif predicted is not None:
            worth = predicted.gather(2, place.clamp_max(tokens - 1))
        elif rule == "chance":
            worth = ((place * 7919 + 104729) % 65521).float()
        else:
            worth = place.float()
        worth = worth.masked_fill((place >= end - recent) | (place == 0), math.inf).masked_fill(
            place >= GONE, -math.inf
        )
        kept = worth.topk(min(most, worth.shape[-1]), -1).indices
        place, total, decaying = (x.gather(2, kept) for x in (place, total, decaying))
        over = torch.arange(place.shape[-1], device=q.device) >= budget_G1
        place = place.masked_fill(over, GONE)
    return torch.cat(outputs, 3).flatten(1, 2).to(q.dtype)


def print_table(report: dict[str, Any], console: Console) -> None:
    """A row for each rule."""
    table = Table("rule", "tokens", "perplexity", title="kept by exact heads")
    names = [f"{entry['kind']} {entry['length']}" for entry in report["rows"][0]["recall"]] if report["rows"] else []
    for name in names:
        table.add_column(name, justify="right")
    for row in report["rows"]:
        shares = [f"{100 * entry['accuracy']:.0f}" for entry in row["recall"]]
        table.add_row(row["rule"], str(row["tokens"]), f"{row['perplexity']:.2f}", *shares)
    console.print(table)


if __name__ == "__main__":
    main(globals(), AdmissionBench())

"""Does another update of the linear state recall more than the plain sum?

    python benchmarks/state_updates.py --model FOLDER --data alpaca.jsonl.gz --haystack wiki.jsonl.gz --json FILE

Beside the window stands a state S, what is read from it, and a normaliser z, the weight of all that is far. Arms:

    sum          S <- S + phi_k v^T, z <- z + phi_k                               what the package does
    gated        both decay before that by a factor alpha, as in Mamba-2 (arXiv:2405.21060)
    delta        S <- S + beta k (v - S^T k)^T, z as in sum; k = phi_k / |phi_k|  (arXiv:2406.06484)
    gated_delta  S <- alpha S + beta k (v - alpha S^T k)^T, z as in gated         (arXiv:2412.06464)

with beta = sigmoid(w . key + b) and alpha = exp(-softplus(a) sigmoid(w' . key + b')), learned per state head from the
rotated key. With a delta rule the far part's numerator is its denominator phi_q . z times what the normalised query
reads from S: far part and window mix by their weights as before.

All arms train as the recipe says (its stage 2 adds LoRA), with the chunked plain-PyTorch implementation and on the
same data. Held-out loss of stage 1; then, after each stage, recall in the haystack and perplexity of its text.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from bench_tools import free, main, settings_json
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from lolcats.cli.options import parse_source
from lolcats.config import LinearizeConfig
from lolcats.config.attention import AttentionConfig
from lolcats.config.reading import set_fields
from lolcats.conversion import convert, fit_positions, load_base_model
from lolcats.data import PackedDataset, build_datasets
from lolcats.data.retrieval import RetrievalWriter
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.evaluation.recall import recall_accuracy
from lolcats.modeling.fused import fused_kernels
from lolcats.modeling.layer import HybridAttention
from lolcats.ops.hybrid_attention import api, chunked, losses
from lolcats.ops.hybrid_attention.equation import key_features, query_features, repeat_heads
from lolcats.ops.hybrid_attention.grid import Grid
from lolcats.ops.hybrid_attention.params import HybridParams
from lolcats.ops.hybrid_attention.state import HybridState
from lolcats.provenance import provenance
from lolcats.recipes import load_recipe
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.finetune import AdjustStage
from lolcats.training.loop import train
from lolcats.training.progress import Progress

UPDATES = ("sum", "gated", "delta", "gated_delta")
INITIAL_RATE = 0.01, -4.0  # softplus(a), b': a half-life of 3850 tokens
WEIGHT_LR = 0.1  # of w's learning rate, whose products with a key are sums of head_dim terms
TOLERANCE = 1e-8  # relative, in float64


@dataclass(frozen=True)
class StateUpdateBench:
    """What to measure."""

    model: str = ""
    data: str = "yahma/alpaca-cleaned"  # as `lolcats linearize --data`
    haystack: str = "demo"
    updates: tuple[str, ...] = UPDATES
    feature_dims: tuple[int, ...] = (0,)  # columns of the feature maps' weights; 0: the recipe's
    updates_transfer: int = 400  # of the weights, in stage 1
    updates_adjust: int = 600
    exact: str = "[]"  # JSON, as `AttentionConfig.exact`
    initial_beta: float = 0.02  # untrained, nearest to softmax of 0.005, 0.02, 0.1 and 0.5 on SmolLM2-135M-Instruct
    extra_lr: float = 1.0  # learning rate of gates and betas, as a multiple of the feature maps'
    recipe: str = (
        "lolcats-hybrid"  # lolcats-linear's settings with windows of 128 tokens and a mixture, and exact heads
    )
    overrides: str = "{}"  # JSON, fields of the configuration: {"transfer.lr": 0.005}
    kinds: tuple[str, ...] = ("needle", "needles", "copy_400")
    lengths: tuple[int, ...] = (1024, 2048)
    samples: int = 100
    windows: tuple[int, ...] = (1024, 4096)  # for perplexity
    text_tokens: int = 65536  # likewise
    dtype: str = "bfloat16"
    device: str = "cuda"
    seed: int = 0


class UpdateGates(nn.Module):
    """What an update learns in one layer beside feature maps and window factors.

    Attributes:
        gate_a, gate_bias, beta_bias: [S]; gate_weight, beta_weight: [S, D]; None if the update has none.
    """

    def __init__(self, kind: str, layer: HybridAttention, initial_beta: float) -> None:
        super().__init__()
        assert layer.k_weight is not None
        state_heads, head_dim, _ = layer.k_weight.shape
        rate, gate_bias = INITIAL_RATE
        values = {}
        if "gated" in kind:
            values |= {"gate_a": math.log(math.expm1(rate)), "gate_bias": gate_bias}
        if "delta" in kind:
            values |= {"beta_bias": math.log(initial_beta / (1.0 - initial_beta))}
        for name in ("gate_a", "gate_bias", "beta_bias"):
            self.register_parameter(name, None)
            if name in values:
                self.register_parameter(name, nn.Parameter(layer.k_weight.new_full((state_heads,), values[name])))
        for name in ("gate", "beta"):
            found = f"{name}_bias" in values
            weight = nn.Parameter(layer.k_weight.new_zeros(state_heads, head_dim)) if found else None
            self.register_parameter(f"{name}_weight", weight)

    def forward(self, k_BSTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """log alpha [B, S, T], and beta [B, S, T] or None, of rotated keys."""

        def gate(weight_SD: Tensor, bias_S: Tensor) -> Tensor:
            return (torch.einsum("bstd,sd->bst", k_BSTD, weight_SD) + bias_S[:, None]).sigmoid()

        beta_BST = None if self.beta_bias is None else gate(self.beta_weight, self.beta_bias)
        if self.gate_a is None:
            return k_BSTD.new_zeros(k_BSTD.shape[:-1]), beta_BST
        return -softplus(self.gate_a)[:, None] * gate(self.gate_weight, self.gate_bias), beta_BST


class Updates:
    """An update of the state in all linear layers, and how its operator is put in the place of the package's.

    A layer is known by its key feature map's weight, which has a row for each state head that is linear.

    Attributes:
        parameters: by the name that they have in a stage.
    """

    def __init__(self, kind: str, layers: dict[int, HybridAttention], initial_beta: float) -> None:
        self.kind = kind
        self.gates = {id(layer.k_weight): UpdateGates(kind, layer, initial_beta) for layer in layers.values()}
        named = zip(layers, self.gates.values(), strict=True)
        self.parameters: dict[str, nn.Parameter] = {
            f"updates.{index}.{name}": parameter
            for index, gates in named
            for name, parameter in gates.named_parameters()
        }

    def lr_factors(self, factor: float) -> dict[str, float]:
        return {name: factor * (WEIGHT_LR if name.endswith("_weight") else 1.0) for name in self.parameters}

    def means(self) -> dict[str, float]:
        """Of each kind of parameter, over all layers and heads."""
        names = dict.fromkeys(name.split(".")[-1] for name in self.parameters)
        kinds = {name: [x for full, x in self.parameters.items() if full.endswith(name)] for name in names}
        return {name: torch.stack([value.mean() for value in values]).mean().item() for name, values in kinds.items()}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block hybrid attention is chunked, in one piece, with this update."""
        changed: list[tuple[Any, str, Any]] = [
            (api, "has_kernel", lambda *_: False),
            (losses, "has_kernel", lambda *_: False),
            (chunked, "PIECE_TOKENS", 2**30),
        ]
        if self.kind != "sum":
            changed.append((chunked, "_linear_part", self.linear_part))
        originals = [getattr(module, name) for module, name, _ in changed]
        api._calls.clear()  # which know a route
        for module, name, value in changed:
            setattr(module, name, value)
        try:
            yield
        finally:
            for (module, name, _), original in zip(changed, originals, strict=True):
                setattr(module, name, original)
            api._calls.clear()

    def linear_part(
        self,
        q_BHED: Tensor,
        k_BGED: Tensor,
        v_BGED: Tensor,
        config: AttentionConfig,
        params: HybridParams,
        grid: Grid,
        state: HybridState,
        after: HybridState,
        need_state: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `chunked._linear_part`, of whole sequences; the state after them is not computed."""
        if need_state or not grid.fresh or grid.chunk != config.window_size or config.window != "terraced":
            raise UserError(
                f"updates of the state are measured on whole sequences without a cache, in terraced windows of 64 or"
                f" more tokens; got window={config.window}, window_size={config.window_size}, chunks of {grid.chunk}"
            )
        phi_k_BSEF = key_features(k_BGED, config, params) * (grid.index_E >= config.sinks)[:, None]
        heads, state_heads = q_BHED.shape[1], phi_k_BSEF.shape[1]
        log_alpha_BSE, beta_BSE = self.gates[id(params.k_weight)](repeat_heads(k_BGED, state_heads))
        # Queries of chunk n read what the chunks before n - late have left.
        late = config.reach // grid.chunk
        used = max(grid.chunks - 1 - late, 0)

        def blocks(x_BSEx: Tensor) -> Tensor:
            return x_BSEx.unflatten(2, (grid.chunks, grid.chunk))[:, :, :used]

        def before(states_BSNFX: Tensor) -> Tensor:
            none = states_BSNFX.new_zeros(*states_BSNFX.shape[:2], grid.chunks - used, *states_BSNFX.shape[3:])
            return torch.cat([none, states_BSNFX], 2)

        phi_q_BSNMF = chunked._rows(query_features(q_BHED, config, params), state_heads, grid)
        v_BSNcD, log_BSNc = blocks(repeat_heads(v_BGED, state_heads)), blocks(log_alpha_BSE)
        one_BSNc1 = torch.ones_like(v_BSNcD[..., :1])
        if beta_BSE is None:
            Sz = before(summed_states(blocks(phi_k_BSEF), torch.cat([v_BSNcD, one_BSNc1], -1), log_BSNc))
            numerator, denominator = (phi_q_BSNMF @ Sz).split([v_BSNcD.shape[-1], 1], -1)
        else:
            z_BSNF1 = before(summed_states(blocks(phi_k_BSEF), one_BSNc1, log_BSNc))
            S_BSNFD = before(delta_states(blocks(unit(phi_k_BSEF)), v_BSNcD, log_BSNc, blocks(beta_BSE)))
            denominator = phi_q_BSNMF @ z_BSNF1
            numerator = denominator * (unit(phi_q_BSNMF) @ S_BSNFD)
        return chunked._unrows(numerator, heads), chunked._unrows(denominator, heads), state.S, state.z


def unit(phi: Tensor) -> Tensor:
    return normalize(phi, dim=-1, eps=1e-6)


def summed_states(k_BSNcF: Tensor, v_BSNcX: Tensor, log_alpha_BSNc: Tensor) -> Tensor:
    """[B, S, N, F, X]: S <- alpha S + k v^T, after each chunk."""
    total_BSNc = log_alpha_BSNc.cumsum(-1)
    left_BSNcF = k_BSNcF * (total_BSNc[..., -1:] - total_BSNc).exp()[..., None]  # at the chunk's end
    return _scan(total_BSNc[..., -1].exp()[..., None, None], left_BSNcF.mT @ v_BSNcX, torch.mul)


def delta_states(k_BSNcF: Tensor, v_BSNcD: Tensor, log_alpha_BSNc: Tensor, beta_BSNc: Tensor) -> Tensor:
    """[B, S, N, F, D]: S <- alpha S + beta k (v - alpha S^T k)^T, after each chunk.

    With g the sums of log alpha in a chunk, token t writes k_t u_t^T (the WY representation, arXiv:2406.06484), where

        u_t + beta_t sum_{s < t} e^(g_t - g_s) (k_t . k_s) u_s = beta_t (v_t - e^g_t S_0^T k_t).

    So u = y - w S_0 with y and w from one triangular system, and a chunk takes S_0 to carry @ S_0 + added.
    """
    total_BSNc = log_alpha_BSNc.cumsum(-1)
    beta_BSNc1 = beta_BSNc[..., None]
    fade_BSNcc = (total_BSNc[..., :, None] - total_BSNc[..., None, :]).tril(-1).exp()
    system_BSNcc = (beta_BSNc1 * fade_BSNcc * (k_BSNcF @ k_BSNcF.mT)).tril(-1)  # and ones on the diagonal
    right_BSNcX = beta_BSNc1 * torch.cat([v_BSNcD, total_BSNc.exp()[..., None] * k_BSNcF], -1)
    solved_BSNcX = torch.linalg.solve_triangular(system_BSNcc, right_BSNcX, upper=False, unitriangular=True)
    left_BSNFc = (k_BSNcF * (total_BSNc[..., -1:] - total_BSNc).exp()[..., None]).mT
    added_BSNFD, taken_BSNFF = (left_BSNFc @ solved_BSNcX).split([v_BSNcD.shape[-1], k_BSNcF.shape[-1]], -1)
    whole_BSNF = total_BSNc[..., -1:].exp().expand(*taken_BSNFF.shape[:-1])
    return _scan(whole_BSNF.diag_embed() - taken_BSNFF, added_BSNFD, torch.matmul)


def _scan(carry_BSNxx: Tensor, added_BSNFX: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """States after each chunk: times(carry, the state before) + added."""
    states: list[Tensor] = []
    for carry, added in zip(carry_BSNxx.unbind(2), added_BSNFX.unbind(2), strict=True):
        states.append(added + times(carry, states[-1]) if states else added)
    return torch.stack(states, 2) if states else added_BSNFX


def token_by_token(
    kind: str, q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, params: HybridParams, gates: UpdateGates
) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of the linear part in plain steps, without a grid: the truth for `verify`."""
    tokens, state_heads = q.shape[2], params.k_weight.shape[0] if params.k_weight is not None else 0
    phi_q, phi_k = query_features(q, config, params), key_features(k, config, params)
    log_alpha, beta = gates(repeat_heads(k, state_heads))
    alpha, v = log_alpha.exp()[..., None], repeat_heads(v, state_heads)
    S, z = v.new_zeros(*v.shape[:2], phi_k.shape[-1], v.shape[-1]), v.new_zeros(*phi_k.shape[:2], phi_k.shape[-1])
    states = [(S, z)]
    for t in range(tokens):
        if t >= config.sinks:
            S, z, phi = alpha[:, :, t, :, None] * S, alpha[:, :, t] * z + phi_k[:, :, t], phi_k[:, :, t]
            if beta is None:
                S = S + phi[..., :, None] * v[:, :, t, None]
            else:
                key = phi / phi.norm(dim=-1, keepdim=True)
                error = v[:, :, t] - (key[..., :, None] * S).sum(-2)
                S = S + beta[:, :, t, None, None] * key[..., :, None] * error[..., None, :]
        states.append((S, z))
    numerators, denominators = [], []
    for t in range(tokens):
        S, z = (repeat_heads(x, q.shape[1]) for x in states[int(config.window_start(torch.tensor(t)))])
        phi = phi_q[:, :, t]
        denominators.append((phi * z).sum(-1, keepdim=True))
        read = (phi[..., None] * S).sum(-2)
        numerators.append(read if beta is None else denominators[-1] * read / phi.norm(dim=-1, keepdim=True))
    return torch.stack(numerators, 2), torch.stack(denominators, 2)


def verify(attention: AttentionConfig, device: str) -> dict[str, float]:
    """The largest difference of each update's chunked form from `token_by_token`, in outputs and gradients, relative to
    the largest value of each; on random float64 input.

    Raises:
        RuntimeError: one is more than rounding.
    """
    config = replace(attention, window_size=64, feature_dim=8, exact=(), linear_length_cap=0)
    found = {}
    for kind in UPDATES:
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int, scale: float = 1.0, draw: torch.Generator = draw) -> Tensor:
            return (scale * torch.randn(*shape, generator=draw, dtype=torch.float64)).to(device)

        layer = HybridAttention(config, 4, 2, 16, device=device)
        layer.k_weight, layer.q_weight = (
            nn.Parameter(random(*weight.shape)) for weight in (layer.k_weight, layer.q_weight)
        )
        updates = Updates(kind, {0: layer}, 0.5)
        (gates,) = updates.gates.values()
        for parameter in updates.parameters.values():
            parameter.data = random(*parameter.shape, scale=0.5) - 1.0  # half-lives of some 10 tokens
        q, k, v = (random(2, heads, 340, 16).requires_grad_() for heads in (4, 2, 2))
        params, grid = layer.params(), Grid(config, torch.zeros(2, dtype=torch.int64, device=device), 340, fresh=True)
        state = api.initial_state(config, params, k)
        placed = (grid.place(x, None, torch.float64) for x in (q, k, v))
        with updates.installed():
            numerator, denominator, *_ = chunked._linear_part(*placed, config, params, grid, state, state, False)
        ours = [grid.pick(numerator), grid.pick(denominator)]
        truth = list(token_by_token(kind, q, k, v, config, params, gates))
        weights = [q, k, v, layer.q_weight, layer.k_weight, *updates.parameters.values()]
        outward = [random(*x.shape) for x in truth]
        pairs = list(zip(ours, truth, strict=True))
        gradients = (torch.autograd.grad(x, weights, outward, retain_graph=True) for x in (ours, truth))
        pairs += zip(*gradients, strict=True)
        errors = torch.stack([((one - other).abs().max() / other.abs().max()).detach() for one, other in pairs])
        found[kind] = float(errors.max())  # NaN, if one is
        if not found[kind] < TOLERANCE:
            raise RuntimeError(f"{kind}: the chunked form differs from the plain one by {found[kind]:.1e}")
    return found


class UpdateTransfer(TransferStage):
    """Stage 1, in which the update's own parameters learn beside each layer's."""

    def __init__(self, updates: Updates, extra_lr: float, *args: Any, **kwargs: Any) -> None:
        self.updates, self.lr_factors = updates, updates.lr_factors(extra_lr)
        super().__init__(*args, **kwargs)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        blocks = super().blocks()
        for name, parameter in self.updates.parameters.items():
            blocks[self.block_of_layer[int(name.split(".")[1])]][name] = parameter
        return blocks


class UpdateAdjust(AdjustStage):
    """Stage 2, likewise."""

    def __init__(self, updates: Updates, extra_lr: float, *args: Any, **kwargs: Any) -> None:
        self.updates, self.extra_lr = updates, extra_lr
        super().__init__(*args, **kwargs)

    def blocks(self) -> list[dict[str, nn.Parameter]]:
        return [super().blocks()[0] | self.updates.parameters]

    @property
    def lr_factors(self) -> dict[str, float]:
        own = (self.config.feature_lr or self.config.lr) / self.config.lr
        return super().lr_factors | self.updates.lr_factors(own * self.extra_lr)


def configuration(bench: StateUpdateBench) -> LinearizeConfig:
    """The recipe's, with what the benchmark sets."""
    if unknown := set(bench.updates) - set(UPDATES):
        raise UserError(f"--updates: {', '.join(unknown)}; there are {', '.join(UPDATES)}")
    values = set_fields(
        load_recipe(bench.recipe),
        {
            "model.path": bench.model,
            "model.dtype": bench.dtype,
            "model.device": bench.device,
            "data.sources": [parse_source(bench.data)],
            "attention.exact": yaml.safe_load(bench.exact),
            "transfer.max_steps": bench.updates_transfer,
            "adjust.max_steps": bench.updates_adjust,
            "seed": bench.seed,
            **yaml.safe_load(bench.overrides),
        },
    )
    config = LinearizeConfig.from_dict(values)
    attention = config.attention
    if attention.exact_budget is not None or attention.feature_map is None or attention.is_retention:
        raise UserError("--exact: name the heads, without a budget; and the recipe needs a feature map without decay")
    if attention.window != "terraced" or attention.window_size < 64:
        raise UserError(
            f"{bench.recipe} has window={attention.window} and window_size={attention.window_size}: expected terraced"
            " windows of 64 or more tokens; try --overrides '{\"attention.window_size\": 128}'"
        )
    return config


def run(bench: StateUpdateBench, console: Console, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A row for each number of features and update."""
    config = configuration(bench)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"settings": settings_json(bench), "config": config.model_dump(mode="json")}
    report |= {"provenance": provenance(), "verified": verify(config.attention, bench.device), "rows": rows}
    keep(report)
    console.print(f"chunked against token by token, relative difference: {report['verified']}", highlight=False)
    for columns in bench.feature_dims:
        attention = replace(config.attention, feature_dim=columns) if columns else config.attention
        for kind in bench.updates:
            console.print(f"--- {kind}, feature_dim={attention.feature_dim}", highlight=False)
            began_s, row = time.monotonic(), {"update": kind, "feature_dim": attention.feature_dim}
            rows.append(row)
            for name, found in train_and_measure(bench, config, attention, kind, console):
                row |= {name: found, "seconds": time.monotonic() - began_s}
                keep(report)
            console.print(str(row), highlight=False, markup=False, soft_wrap=True)
            free(torch.device(bench.device))
    return report


def train_and_measure(
    bench: StateUpdateBench, config: LinearizeConfig, attention: AttentionConfig, kind: str, console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each stage's name and numbers, once it is over."""
    torch.manual_seed(bench.seed)
    base, tokenizer = load_base_model(config.model)
    sections = {name: fit_positions(config.data_of(name), base) for name in ("transfer", "adjust")}
    # Packed once: later arms find them in the cache.
    data = {name: build_datasets(part, tokenizer, seed=bench.seed, progress=False) for name, part in sections.items()}
    model = convert(base, attention)
    updates = Updates(kind, dict(model.linear_layers()), bench.initial_beta)
    stages: tuple[tuple[Any, Any], ...] = ((UpdateTransfer, config.transfer), (UpdateAdjust, config.adjust))
    with updates.installed():
        for make, section in stages:
            torch.manual_seed(bench.seed)
            training, validation = data[make.name]
            stage = make(updates, bench.extra_lr, model, section, validation, report=console.print)
            with fused_kernels(model, section.fused_kernels, console.print), tempfile.TemporaryDirectory() as folder:
                where = {"directory": Path(folder) / "stage", "progress": Progress(console)}
                result = train(stage, training, section, seed=bench.seed, **where)
            graphs = stage.step.enabled
            stage.step.release()
            console.print(f"{stage.name}: {result.update_seconds:.0f} s of updates; recall and perplexity follow")
            yield (
                stage.name,
                {
                    f"held_out_{stage.metric}": result.best_metric,
                    f"initial_{stage.metric}": result.history[0][stage.metric],
                    "best_step": result.best_step,
                    "update_seconds": result.update_seconds,
                    "cuda_graphs": graphs,
                    "peak_gib": result.peak_memory_bytes / 2**30,
                    "learned_means": updates.means(),
                    **measured(bench, model.eval(), tokenizer),
                },
            )


@torch.no_grad()
def measured(bench: StateUpdateBench, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Recall by kind and length; perplexity of the haystack's last fifth by window, of nearly the same tokens."""
    settings = {"kinds": bench.kinds, "lengths": bench.lengths, "samples": bench.samples, "seed": bench.seed}
    recall = recall_accuracy(model, tokenizer, haystack=bench.haystack, **settings)
    writer = RetrievalWriter(tokenizer, "test", bench.haystack, begin_token=True)
    perplexity = {}
    for window in bench.windows:
        size = window - len(writer.begin)
        count = min(bench.text_tokens, len(writer.text)) // size
        if count == 0:
            raise UserError(f"--windows {window}: the haystack and --text-tokens have fewer tokens; give more")
        ids_NT = np.insert(writer.text[: count * size].reshape(count, size), [0], writer.begin, axis=1)
        is_label_NT = np.broadcast_to(np.arange(window) > 0, ids_NT.shape)
        text = PackedDataset(ids_NT, is_label_NT, info={})
        perplexity[str(window)] = dataset_perplexity(model, text, batch_size=max(1, 8192 // window))["perplexity"]
    return {"recall": recall, "perplexity": perplexity}


def print_table(report: dict[str, Any], console: Console) -> None:
    """A row for each update and stage."""
    table = Table("update", "feature_dim", "after", "held out", title="updates of the linear state: recall in %")
    done = [(row, name) for row in report["rows"] for name in ("transfer", "adjust") if name in row]
    if done:
        first = done[0][0][done[0][1]]
        for name in [f"ppl {window}" for window in first["perplexity"]]:
            table.add_column(name, justify="right")
        for entry in first["recall"]:
            table.add_column(f"{entry['kind']} {entry['length']}", justify="right")
    for row, name in done:
        found = row[name]
        held_out = found.get("held_out_loss", found.get("held_out_perplexity"))
        numbers = [f"{held_out:.3f}", *(f"{value:.2f}" for value in found["perplexity"].values())]
        numbers += [f"{100 * entry['accuracy']:.0f}" for entry in found["recall"]]
        table.add_row(row["update"], str(row["feature_dim"] or "default"), name, *numbers)
    console.print(table)


if __name__ == "__main__":
    main(globals(), StateUpdateBench())

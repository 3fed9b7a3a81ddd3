"""Memory and time of each stage of a linearization, from its resolved configuration and the model's config.json.

No memory term is fitted to a measurement. tests/test_plan.py compares both with measured runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lolcats.config import LinearizeConfig, set_fields
from lolcats.conversion import fit_positions, linearized_config
from lolcats.data.retrieval import MOST_LABELS
from lolcats.errors import UserError
from lolcats.modeling.cache import recurrent_layers
from lolcats.modeling.cache_size import heads_in_budget, native_window, window_in_budget
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.fused import FAMILIES
from lolcats.modeling.loading import locate
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.ops.hybrid_attention.feature_maps import FEATURE_MAPS
from lolcats.parallel.blockwise.layers import divide
from lolcats.parallel.sharding import REPLICATED_SHARE
from lolcats.training.head import part_size
from lolcats.training.head_gates import FAR_TEXTS, border, far_length

_FIELDS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
_FIELDS += " tie_word_embeddings"
_ROWS = {
    "llama3-8b": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "llama3-70b": (8192, 80, 64, 8, 128, 28672, 128256, False),
    "llama3-405b": (16384, 126, 128, 8, 128, 53248, 128256, False),
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True),
    "tiny": (64, 2, 4, 2, 16, 128, 256, False),
}
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_FIELDS.split(), row, strict=True)) for name, row in _ROWS.items()}
HUB_IDS = {f"llama3-{size}": f"meta-llama/Llama-3.1-{size.upper()}" for size in ("8b", "70b", "405b")}
HUB_IDS["smollm2-135m"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
GPUS = {24: (165, 32), 48: (362, 32), 80: (989, 450), 141: (989, 450)}
"""GB as sold -> dense bfloat16 TFLOP/s, GB/s between GPUs (data sheets of RTX 4090, L40S, H100, H200). The driver shows
a few percent more bytes than are sold; they are left to the CUDA context and fragmentation."""
UTILISATION = {"transfer": (0.21, 0.58), "gates": (0.18, 0.57), "adjust": (0.18, 0.57)}
"""Share of that rate at hidden sizes 576 and 4096, 8192 tokens a micro-step (benchmarks/results/train_*.json)."""
GIB, GB, DISK_GB_S, EPOCH_TOKENS = 2**30, 10**9, 2, 20_000_000  # the last where `max_train_tokens` is not set
WEIGHT, FLOAT, TRAINED, NF4 = 2, 4, 20, 0.5 + 4 / 64  # bytes of a parameter; trained: two gradients, Adam's moments
WORKSPACES, TUNING = 96 * 2**20, 256 * 2**20  # of cuBLAS; of Triton while it tunes kernels in stage 1's first steps
KL_BYTES, KL_PRODUCTS = 20, 5  # of a logit, and with the head, where the teacher's logits are compared
LABEL_BYTES = 14 / 4  # of a logit where they are not: a quarter of them at once
CHUNK = 64  # tokens of a state of the kernels


Way = tuple[str, int, dict[str, Any], dict[str, tuple[float, float]]]  # name, processes, what it sets, stages' cost


class Model(NamedTuple):
    """A linearized model's heads, those that gates will make exact, and its numbers of parameters."""

    config: LolcatsConfig
    chosen: dict[int, list[int]]
    parameters: int
    in_layers: int
    matrices: int
    maps: int


def count(config: LinearizeConfig) -> Model:
    """Count the configured model, built without weights and converted as in a real run; a UserError says why not."""
    shape = {hub_id: SHAPES[name] for name, hub_id in HUB_IDS.items()}.get(str(config.model.path))
    source: Any = LlamaConfig(**shape, max_position_embeddings=2**17) if shape else locate(config.model).config
    advice = "cannot be planned; measure a short run: lolcats linearize MODEL --max-steps 20"
    if recurrent := recurrent_layers(source):
        raise UserError(f"{source.model_type} with layers without attention ({recurrent}) {advice}")
    with torch.device("meta"):
        base: Any = AutoModelForCausalLM.from_config(source, dtype=torch.bfloat16).eval()
    for stage in {"transfer", "adjust"} & set(config.stages):
        fit_positions(config.data_of(stage), base)
    attention, linearized, chosen = config.attention, linearized_config(base, config.attention), {}
    if attention.exact_budget is not None and not config.adjust.softmax_control:
        chosen = heads_in_budget(linearized, attention.exact_budget, torch.bfloat16)
    if isinstance(attention.exact_window, str):
        window = window_in_budget(linearized, attention, torch.bfloat16, chosen)
        linearized.attention = replace(linearized.attention, exact_window=window)
    linears = {f"{name}.weight" for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    prefix = linearized.layer_heads[0].module.rsplit(".", 2)[0] + "."  # model.layers.
    layers = {name: value for name, value in base.named_parameters() if name.startswith(prefix)}
    if unknown := [name for name, value in layers.items() if value.dim() > 1 and name not in linears]:
        raise UserError(f"{source.model_type} with {unknown[0]}, which is no linear layer (experts?), {advice}")
    counts = base.num_parameters(), sum(value.numel() for value in layers.values())
    matrices = sum(value.numel() for name, value in layers.items() if name in linears)
    student_layers = LolcatsForCausalLM(linearized, base).linear_layers()
    maps = sum(value.numel() for _, layer in student_layers for value in layer.parameters())
    return Model(linearized, chosen, *counts, matrices, maps)


def cost(model: Model, config: LinearizeConfig, stage: str, memory_gb: float, gpus: int = 1) -> tuple[float, float]:
    """Peak bytes on a GPU and seconds of a stage. Names that end in _L are vectors over the layers."""
    gates, adjust, moved = stage == "gates", stage == "adjust", 0.0
    section: Any = getattr(config, stage)
    compares = gates or (adjust and section.distill_factor > 0)
    again = stage != "transfer" and section.gradient_checkpointing
    attention, text, layer_heads = model.config.attention, model.config.text_config, model.config.layer_heads
    # Tokens of a text, of a micro-step and of the stage.
    data = config.data_of("adjust" if adjust else "transfer")
    length = section.fitting_length(text.max_position_embeddings) if gates else data.sequence_length
    epoch, step_tokens = data.max_train_tokens or EPOCH_TOKENS, section.micro_batch_size * length
    tokens = section.max_steps * section.batch_size * length if section.max_steps else section.epochs * epoch
    far, settling = 0, 0.0  # tokens of a text that settles which heads are exact, and FLOPs of them all
    steps, row = tokens / step_tokens / gpus, step_tokens * WEIGHT  # row: bytes of an activation with one column
    hidden, vocabulary, layers = text.hidden_size, text.vocab_size, len(layer_heads)
    # Heads, windows and features of each layer, and FLOPs of its attention for a token.
    heads_L, kv_L, dim_L = np.array([[heads.num_heads, heads.num_kv_heads, heads.head_dim] for heads in layer_heads]).T
    exact_L = [len({*heads.exact, *(model.chosen.get(heads.index, ()) if adjust else ())}) for heads in layer_heads]
    linear_L = 0.0 * kv_L if adjust and section.softmax_control else 1 - exact_L / kv_L  # share of the heads
    native_L = np.array([min(native_window(model.config, heads) or length, length) for heads in layer_heads])
    blocks = attention.window_blocks - 0.5 if attention.window == "terraced" else 1  # of the window, that a query sees
    window = attention.window_size * blocks + attention.sinks
    phi = FEATURE_MAPS[attention.feature_map] if attention.feature_map else None
    columns_L = np.array([attention.feature_dim or phi.default_dim(int(dim)) if phi else 0 for dim in dim_L])
    features_L = columns_L * (phi.multiple if phi else 0)
    states_L = heads_L if attention.share_state == "query_head" else kv_L
    chunks_L = linear_L * states_L * features_L * dim_L / CHUNK  # columns of the kernels' states
    softmax_L = 4 * heads_L * dim_L * (native_L - native_L * (native_L - 1) / 2 / length)  # FLOPs of a token
    hybrid_L = 2 * (heads_L + states_L) * dim_L * (features_L + columns_L)
    hybrid_L = linear_L * (hybrid_L + 4 * heads_L * dim_L * min(window, (length + 1) / 2))
    # The frozen model's forward pass.
    mlp = float(model.matrices / hidden - 2 * ((heads_L + kv_L) * dim_L).sum()) / layers  # gate, up and their product
    frozen, frozen_pass = 2 * model.matrices + softmax_L.sum(), row * (4 * hidden + mlp)
    # FLOPs of a token, bytes of what is trained, and bytes of activations: stage 1 holds one layer's graph, gates and
    # stage 2 all of them, or with recomputed activations their inputs.
    if stage == "transfer":
        flops, trained = frozen + 3 * hybrid_L.sum(), float(model.maps * TRAINED)
        student_L = 3 * hidden + (3 * heads_L + 2 * kv_L) * dim_L + linear_L * (heads_L + states_L) * columns_L
        student_L = row * (student_L + 2 * chunks_L) + step_tokens * 4 * FLOAT * heads_L
        activations = max(frozen_pass, student_L.max() + TUNING)
    else:
        sides_L = sum(hidden + (heads_L if role in "qo" else kv_L) * dim_L for role in config.adjust.lora_targets)
        lora = adjust * config.adjust.lora_rank * np.sum(sides_L * (linear_L > 0))
        inner = np.sum((1 - linear_L + gates * (linear_L > 0)) * softmax_L + hybrid_L) + 2 * lora
        first = int(np.argmax(linear_L > 0)) * (not again)  # layers before it have no backward pass
        if gates and (far := far_length(section, text.max_position_embeddings)):
            trials = 1 + 2 * border(sum(map(len, model.chosen.values())))  # the teacher's, too
            settling = FAR_TEXTS * far * trials * float(2 * model.matrices + softmax_L.sum() * far / length)
        labels = min(MOST_LABELS, length) / length if gates else 1.0
        head = labels * (KL_PRODUCTS if compares else 2) * 2 * hidden * vocabulary
        backward = (2 * model.matrices + 2 * inner) * (1 - first / layers)
        flops = (2 * model.matrices + inner) * (1 + again) + backward + head + compares * frozen
        saved_L = (2 * heads_L + 2 * kv_L) * dim_L + chunks_L + mlp * 2 / 3 + adjust * hidden * (linear_L > 0)
        saved_L = saved_L + heads_L * dim_L * (gates | (linear_L > 0) & (linear_L < 1))  # both kinds' outputs
        saved_L = saved_L + (2 * hidden if text.model_type in FAMILIES else 4 * hidden + mlp / 3)
        saved_L = row * saved_L + step_tokens * heads_L * (1 + gates + 2 * linear_L) * FLOAT
        kept = layers * row * hidden if again else saved_L[first:].sum()
        logits = min(part_size(vocabulary), step_tokens * labels) * vocabulary * (KL_BYTES if compares else LABEL_BYTES)
        others = row * 5 * hidden + logits, compares * (row * 4 * hidden + frozen_pass)
        activations = kept + max(row * (2 * hidden + mlp / 3) + again * saved_L.max(), *others)
        activations = max(activations, far * WEIGHT * (4 * hidden + mlp))
        trained = lora * TRAINED + model.maps * (TRAINED if adjust and section.train_feature_maps else FLOAT)
    # Evaluations have the logits of all positions.
    streams = stage == "transfer" and section.block_mode == "streaming"
    if adjust or (stage == "transfer" and not streams and (section.select_by != "loss" or not config.adjust.enabled)):
        sequences = max(section.micro_batch_size, config.adjust.micro_batch_size)  # whose perplexity is measured
        activations = max(activations, sequences * length * (2 * vocabulary + 4 * hidden + mlp) * WEIGHT)
    # Where the weights are: in one process, some layers at a time, in 4 bits, or sharded over processes.
    tflop_s, link = GPUS[max((size for size in GPUS if size <= memory_gb), default=24)]
    weights, ends = float(model.parameters * WEIGHT), vocabulary * hidden * WEIGHT
    layer, buffers = model.in_layers / layers * WEIGHT, float(WORKSPACES)
    replicated = 0 if config.parallel.shard == "on" else REPLICATED_SHARE * memory_gb * GB
    if streams:  # one process trains a block; its inputs wait on disk
        parts = divide(np.flatnonzero(linear_L).tolist(), section.block_layers)
        weights = max(part.end - part.begin for part in parts) * layer + ends
        trained = trained * len(parts[0].linear) / np.count_nonzero(linear_L)
        moved = ((len(parts) - 1) * (epoch + tokens) * hidden * WEIGHT + model.parameters * WEIGHT) / DISK_GB_S / GB
    elif config.model.load_in_4bit:
        weights, buffers = weights - model.matrices * (WEIGHT - NF4), buffers + layer
    elif gpus > 1 and config.parallel.shard != "off" and weights > replicated:
        weights = (weights - ends * text.tie_word_embeddings) / gpus + ends * text.tie_word_embeddings
        buffers += 3 * layer + ends * (not text.tie_word_embeddings)  # FSDP2: this layer, the next, one being copied
        moved = steps * (2 + compares if adjust or gates else 1) * model.in_layers * WEIGHT / link / GB
    rate = np.interp(np.log(hidden), np.log([576, 4096]), UTILISATION[stage]) * tflop_s * 1e12
    seconds = (tokens * flops + settling) / rate / (1 if streams else gpus) + moved
    return float(weights + trained + buffers + activations), float(seconds)


def changed(config: LinearizeConfig, changes: dict[str, Any]) -> LinearizeConfig:
    """The configuration that `--set` makes of it."""
    return LinearizeConfig.from_dict(set_fields(config.model_dump(mode="json"), changes))


def ways(model: Model, config: LinearizeConfig, memory_gb: float, gpus: int | None = None) -> Iterator[Way]:
    """One process, 4-bit weights, block by block, several processes (8 if `gpus` is None); each with the largest
    micro-batches that fit, and recomputed activations where none does."""
    limit, four = memory_gb * GB, {"model.load_in_4bit": True}
    plans: list[tuple[str, int, dict[str, Any]]] = [("one process", 1, {}), ("one process, 4-bit", 1, four)]
    loss = {"transfer.select_by": "loss"} if config.transfer.select_by != "loss" else {}
    if "transfer" in config.stages and changed(config, loss).refused_in_blocks() is None:
        for layers in range(len(model.config.linear_layers), 0, -1):
            blocks = loss | {"transfer.block_mode": "streaming", "transfer.block_layers": layers}
            if cost(model, changed(config, blocks), "transfer", memory_gb)[0] <= limit:
                break
        stage_2 = four if config.adjust.enabled else {}
        plans.append((f"blocks of {layers}" + ", then 4-bit" * len(stage_2), 1, blocks | stage_2))
    if gpus != 1:
        plans.insert(len(plans) if gpus is None else 0, (f"{gpus or 8} processes", gpus or 8, {}))
    for name, ranks, changes in plans:
        for stage in reversed(changed(config, changes).stages):  # stage 2's micro-batches measure stage 1, too
            section, share = getattr(config, stage), -(-getattr(config, stage).batch_size // ranks)
            sizes = [size for size in range(min(section.micro_batch_size, share), 0, -1) if share % size == 0]
            for again, size in product((False, True), sizes):
                fields = {"batch_size": share * ranks, "micro_batch_size": size}
                fields |= {"gradient_checkpointing": True} if again and stage != "transfer" else {}
                option = {f"{stage}.{key}": value for key, value in fields.items() if value != getattr(section, key)}
                if cost(model, changed(config, changes | option), stage, memory_gb, ranks)[0] <= limit:
                    break
            changes = changes | option
        final = changed(config, changes)
        yield name, ranks, changes, {stage: cost(model, final, stage, memory_gb, ranks) for stage in final.stages}

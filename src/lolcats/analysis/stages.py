"""The weights of an exported model after each stage, switched in place.

What a folder keeps decides what can be compared. Feature maps before and after stage 1 are small and lie in
`run/`; the projections before stage 2 are the exported ones less the adapters, which lie in `adapter/` or `run/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lolcats.config import AdjustSection, LinearizeConfig
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.modeling.layer import HybridAttention
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.report import read_report
from lolcats.training.checkpoint import list_checkpoints, read_checkpoint

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_A(?:\.default)?\.weight")


@dataclass
class StageWeights:
    """A model whose weights can be set to those after each stage.

    Attributes:
        model: in eval mode; holds the last stage's weights after loading.
        names: the stages that are known, in order, of "swapped", "transfer", "adjust"; "trained" alone for a
            folder that does not say how it was made.
        tensors: for each stage, the parameters that differ between stages, by name.
        notes: sentences on what was missing or approximated.
    """

    model: LolcatsForCausalLM
    names: list[str]
    tensors: dict[str, dict[str, Tensor]]
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> str:
        return self.names[-1]

    @torch.no_grad()
    def use(self, stage: str, *, under: str = "") -> None:
        """Let the parameters whose names start with `under` be those after `stage`."""
        for name, tensor in self.tensors[stage].items():
            if name.startswith(under):
                self.model.get_parameter(name).data = tensor

    def projections_differ(self, stage: str, other: str, *, under: str = "") -> bool:
        """Whether any parameter but feature maps and window factors differs between two stages."""
        return any(
            name.startswith(under)
            and ".linear_attention." not in name
            and tensor is not self.tensors[other].get(name, tensor)
            for name, tensor in self.tensors[stage].items()
        )


def load_stages(folder: str | Path, *, dtype: str = "auto", device: str = "auto") -> tuple[StageWeights, Any]:
    """The model in `folder` with the weights of all stages that can be recovered, and its tokenizer.

    Raises:
        UserError: no linearized model there.
    """
    folder = Path(folder).expanduser()
    model, tokenizer = load_model(folder, dtype=dtype, device=device)
    if not isinstance(model, LolcatsForCausalLM):
        raise UserError(f"{folder} is not a linearized model; give the output folder of `lolcats linearize`")
    values = (read_report(folder) or {}).get("config") or model.config.provenance.get("config")
    if values is None:
        note = "The folder does not say how it was made: only its weights as they are could be analysed."
        return StageWeights(model, ["trained"], {"trained": {}}, notes=[note]), tokenizer
    config, notes = LinearizeConfig.from_dict(values), list[str]()
    before, after = _around_adjusting(model, config, folder, notes)
    stages = _stages(model, config, folder, notes, before, after)
    weights = StageWeights(model, list(stages), stages, notes)
    weights.use(weights.last)
    return weights, tokenizer


def _stages(
    model: LolcatsForCausalLM,
    config: LinearizeConfig,
    folder: Path,
    notes: list[str],
    before: dict[str, Tensor] | None,
    after: dict[str, Tensor],
) -> dict[str, dict[str, Tensor]]:
    """Parameters by stage, given the projections before and after stage 2."""
    exported = {name: tensor.data for name, tensor in model.named_parameters() if ".linear_attention." in name}
    stages: dict[str, dict[str, Tensor]] = {}
    if before is not None:
        stages["swapped"] = before | _initial_feature_maps(model)
        if config.transfer.enabled and not config.adjust.softmax_control:
            moved_later = config.adjust.enabled and config.adjust.train_feature_maps
            transferred = _saved_feature_maps(model, folder / "run" / "transfer") if moved_later else exported
            if transferred is None:
                notes.append("run/transfer is missing: feature maps as stage 1 left them are not known.")
            else:
                stages["transfer"] = before | transferred
    if config.adjust.enabled or before is None:
        stages["adjust"] = after | exported
    return stages


def _around_adjusting(
    model: LolcatsForCausalLM, config: LinearizeConfig, folder: Path, notes: list[str]
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """Parameters changed by stage 2, before it (None: not recoverable) and after it."""
    if not config.adjust.enabled:
        return {}, {}
    updates = _lora_updates(folder / "run" / "adjust", config.adjust)
    if not updates:
        notes.append(
            "The weights before stage 2 are not in the folder (no LoRA checkpoint in run/adjust): only the last"
            " stage was analysed."
        )
        return None, {}
    own = {name: model.get_parameter(name).data for name in updates}
    before = {name: (tensor.float() - updates[name].to(tensor.device)).to(tensor.dtype) for name, tensor in own.items()}
    if any(tensor.dtype != torch.float32 for tensor in own.values()):
        notes.append("The projections before stage 2 are the exported ones less the adapters, exact up to rounding.")
    return before, own


def _initial_feature_maps(model: LolcatsForCausalLM) -> dict[str, Tensor]:
    """Feature maps and window factors as conversion makes them."""
    initial: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, HybridAttention):
            shape = (module.num_heads, module.num_kv_heads, module.head_dim)
            fresh = HybridAttention(module.config, *shape, device=module.window_factor.device)
            initial |= {f"{name}.{key}": parameter.data for key, parameter in fresh.named_parameters()}
    return initial


def _saved_feature_maps(model: LolcatsForCausalLM, stage_folder: Path) -> dict[str, Tensor] | None:
    """The best weights of stage 1, under the model's names; None if there are none."""
    best = list_checkpoints(stage_folder, "best")
    if not best:
        return None
    saved = read_checkpoint(best[-1]).tensors["weights"]
    found = {}
    for layer in model.config.linear_layers:
        prefix = f"layers.{layer.index}."
        for key, tensor in saved.items():
            if key.startswith(prefix):
                name = f"model.{layer.module}.linear_attention.{key.removeprefix(prefix)}"
                found[name] = tensor.to(model.get_parameter(name).device)
    return found


def _lora_updates(stage_folder: Path, config: AdjustSection) -> dict[str, Tensor]:
    """What LoRA added to the projections, by the weight's name: [outputs, inputs] float32; empty if not known."""
    best = list_checkpoints(stage_folder, "best")
    if config.method != "lora" or not best:
        return {}
    tensors, scale, found = read_checkpoint(best[-1]).tensors["weights"], config.lora_alpha / config.lora_rank, {}
    for key, a_RI in tensors.items():
        match = _NAME.fullmatch(key)
        b_OR = tensors.get(key.replace(".lora_A", ".lora_B"))
        if match is not None and b_OR is not None:
            found[f"{match['module']}.weight"] = scale * (b_OR.float() @ a_RI.float())
    return found

"""The weights of an exported model after each stage, switched in place.

What a folder keeps decides what can be compared. Feature maps before and after stage 1 are small and lie in
`run/`; the projections before stage 2 are the exported ones less the adapters, which lie in `adapter/` or `run/`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lolcats.config import AdjustSection, LinearizeConfig, ModelSection
from lolcats.errors import UserError
from lolcats.modeling.layer import HybridAttention
from lolcats.modeling.loading import load_base_model
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
        config: of the run; None if the folder does not hold it.
    """

    model: LolcatsForCausalLM
    names: list[str]
    tensors: dict[str, dict[str, Tensor]]
    notes: list[str] = field(default_factory=list)
    config: LinearizeConfig | None = None

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
    loaded, tokenizer = load_base_model(
        ModelSection(path=str(folder), dtype=dtype, device=device),
        allow_linearized=True,
    )
    if not isinstance(loaded, LolcatsForCausalLM):
        raise UserError(f"{folder} is not a linearized model; give the output folder of `lolcats linearize`")
    model = loaded.eval()
    values = (read_report(folder) or {}).get("config") or model.config.provenance.get("config")
    if values is None:
        note = "The folder does not say how it was made: only its weights as they are could be analysed."
        return StageWeights(model, ["trained"], {"trained": {}}, notes=[note]), tokenizer
    config = LinearizeConfig.from_dict(values)
    weights = StageWeights(model, [], {}, config=config)
    before, after = _around_adjusting(weights, folder)
    _name_stages(weights, folder, before, after)
    weights.use(weights.last)
    return weights, tokenizer


def _name_stages(
    weights: StageWeights, folder: Path, before: dict[str, Tensor] | None, after: dict[str, Tensor]
) -> None:
    """Fill `names` and `tensors`, given the projections before and after stage 2."""
    config = weights.config
    assert config is not None
    exported = _feature_maps(weights.model)
    stages: dict[str, dict[str, Tensor]] = {}
    if before is not None:
        stages["swapped"] = before | _initial_feature_maps(weights)
        transferred = config.transfer.enabled and not config.adjust.softmax_control
        if transferred and not (config.adjust.enabled and config.adjust.train_feature_maps):
            stages["transfer"] = before | exported
        elif transferred:
            saved = _saved_feature_maps(weights.model, folder / "run" / "transfer")
            if saved is None:
                weights.notes.append("run/transfer is missing: feature maps as stage 1 left them are not known.")
            else:
                stages["transfer"] = before | saved
    if config.adjust.enabled or before is None:
        stages["adjust"] = after | exported
    weights.names, weights.tensors = list(stages), stages


def _around_adjusting(weights: StageWeights, folder: Path) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """Parameters changed by stage 2, before it (None: not recoverable) and after it."""
    config, model = weights.config, weights.model
    assert config is not None
    if not config.adjust.enabled:
        return {}, {}
    kept = _updates_of_export(folder)
    updates = kept or _updates_of_run(folder / "run" / "adjust", config.adjust)
    if not updates:
        weights.notes.append(
            "The weights before stage 2 are not in the folder (no adapter/ and no LoRA checkpoint in run/adjust): only"
            " the last stage was analysed."
        )
        return None, {}
    own = {name: model.get_parameter(name).data for name in updates}
    sign = 1 if kept else -1  # beside an adapter, the folder's weights are those before stage 2
    other = {
        name: (tensor.float() + sign * updates[name].to(tensor.device)).to(tensor.dtype) for name, tensor in own.items()
    }
    if not kept and any(tensor.dtype != torch.float32 for tensor in own.values()):
        weights.notes.append(
            "The projections before stage 2 are the exported ones less the adapters, exact up to rounding."
        )
    return (own, other) if kept else (other, own)


def _feature_maps(model: LolcatsForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters() if ".linear_attention." in name}


def _initial_feature_maps(weights: StageWeights) -> dict[str, Tensor]:
    """Feature maps and window factors as conversion makes them."""
    settings = weights.model.config.attention
    if settings.feature_init == "kaiming" and settings.feature_map is not None:
        weights.notes.append("Feature maps start at random: those of the swapped model are a new draw.")
    initial: dict[str, Tensor] = {}
    for name, module in weights.model.named_modules():
        if not isinstance(module, HybridAttention):
            continue
        fresh = HybridAttention(
            module.config,
            module.num_heads,
            module.num_kv_heads,
            module.head_dim,
            device=module.window_factor.device,
        )
        initial.update({f"{name}.{key}": parameter.data for key, parameter in fresh.named_parameters()})
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


# --- what LoRA added to the projections, by the weight's name: [outputs, inputs] float32, empty if not known ---------


def _updates_of_export(folder: Path) -> dict[str, Tensor]:
    settings, weights = folder / "adapter" / "adapter_config.json", folder / "adapter" / "adapter_model.safetensors"
    if not (settings.is_file() and weights.is_file()):
        return {}
    values = json.loads(settings.read_text(encoding="utf-8"))
    return _updates(load_file(weights), values["lora_alpha"] / values["r"])


def _updates_of_run(stage_folder: Path, config: AdjustSection) -> dict[str, Tensor]:
    best = list_checkpoints(stage_folder, "best")
    if config.method != "lora" or not best:
        return {}
    return _updates(read_checkpoint(best[-1]).tensors["weights"], config.lora_alpha / config.lora_rank)


def _updates(tensors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    found = {}
    for key, a_RI in tensors.items():
        match = _NAME.fullmatch(key)
        b_OR = tensors.get(key.replace(".lora_A", ".lora_B"))
        if match is not None and b_OR is not None:
            found[f"{match['module']}.weight"] = scale * (b_OR.float() @ a_RI.float())
    return found

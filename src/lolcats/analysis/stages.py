"""The weights of an exported model after each stage, switched in place.

What a folder keeps decides what can be compared. Feature maps before and after stage 1 are small and lie in
`run/`; the projections before stage 2 are the exported ones less the adapters, which lie in `adapter/` or `run/`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


class Adapter(NamedTuple):
    """One projection's update scale * B A.

    Attributes:
        a_RI: [rank, inputs].
        b_OR: [outputs, rank].
        scale: lora_alpha / rank.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float

    def delta(self) -> Tensor:
        """[outputs, inputs], float32."""
        return self.scale * (self.b_OR.float() @ self.a_RI.float())

    def norm(self) -> float:
        """Frobenius norm of `delta`, without building it: |BA|^2 = tr(B^T B A A^T)."""
        a, b = self.a_RI.double(), self.b_OR.double()
        squared = float(((b.T @ b) * (a @ a.T)).sum())
        return self.scale * max(squared, 0.0) ** 0.5


@dataclass
class StageWeights:
    """A model whose weights can be set to those after each stage.

    Attributes:
        model: in eval mode; holds the last stage's weights after loading.
        names: the stages that are known, in order, of "swapped", "transfer", "adjust"; "trained" alone for a
            folder that does not say how it was made.
        tensors: for each stage, the parameters that differ between stages, by name.
        adapters: the adapters of stage 2, by the name of the weight they change.
        notes: sentences on what was missing or approximated.
        config: of the run; None if the folder does not hold it.
    """

    model: LolcatsForCausalLM
    names: list[str]
    tensors: dict[str, dict[str, Tensor]]
    adapters: dict[str, Adapter] = field(default_factory=dict)
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


def load_stages(
    folder: str | Path, *, base: str | None = None, dtype: str = "auto", device: str = "auto"
) -> tuple[StageWeights, Any]:
    """The model in `folder` with the weights of all stages that can be recovered, and its tokenizer.

    Args:
        base: folder or hub id of the model before linearizing, for exact weights before stage 2; None: what
            the folder keeps.

    Raises:
        UserError: no linearized model there, or `base` is another model.
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
    before, after = _around_adjusting(weights, folder, base)
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


def _around_adjusting(
    weights: StageWeights, folder: Path, base: str | None
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """Parameters changed by stage 2, before it (None: not recoverable) and after it."""
    config, model = weights.config, weights.model
    assert config is not None
    if not config.adjust.enabled:
        return {}, {}
    adapter = adapter_of_export(folder)
    if adapter:  # the folder's weights are those before stage 2
        weights.adapters = adapter
        before = {name: model.get_parameter(name).data for name in adapter}
        return before, {
            name: (tensor.float() + adapter[name].delta().to(tensor.device)).to(tensor.dtype)
            for name, tensor in before.items()
        }
    weights.adapters = adapter_of_run(folder / "run" / "adjust", config.adjust)
    if base is not None:
        return _against_base(weights, base)
    if not weights.adapters:
        weights.notes.append(
            "The weights before stage 2 are not in the folder (no adapter/ and no LoRA checkpoint in run/adjust): give"
            " --base, the model it was made from, to compare stages."
        )
        return None, {}
    after = {name: model.get_parameter(name).data for name in weights.adapters}
    before = {
        name: (after[name].float() - adapter.delta().to(after[name].device)).to(after[name].dtype)
        for name, adapter in weights.adapters.items()
    }
    if any(tensor.dtype != torch.float32 for tensor in after.values()):
        weights.notes.append(
            "The projections before stage 2 are the exported ones less the adapters, exact up to rounding; --base gives"
            " the exact ones."
        )
    return before, after


def _against_base(weights: StageWeights, base: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As `_around_adjusting`, from the weights of the model that was linearized."""
    model, config = weights.model, weights.config
    assert config is not None
    section = config.model.model_copy(
        update={
            "path": base,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "revision": None,
            # a GGUF file is looked for where the run had it, unless another kind of folder is given
            "gguf_file": config.model.gguf_file if base == config.model.path else None,
        }
    )
    original, _ = load_base_model(section)
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for name, parameter in original.named_parameters():
        ours = f"model.{name}"
        try:
            mine = model.get_parameter(ours)
        except AttributeError as error:
            raise UserError(f"--base {base}: it has a parameter {name} that the linearized model lacks") from error
        if mine.shape != parameter.shape:
            raise UserError(
                f"--base {base}: {name} has the shape {list(parameter.shape)}, in the linearized model"
                f" {list(mine.shape)}; give the model that was linearized"
            )
        if not torch.equal(mine.data, parameter.data):
            before[ours], after[ours] = parameter.data, mine.data
    return before, after


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


# --- adapters -----------------------------------------------------------------------------------------------------


def adapter_of_export(folder: Path) -> dict[str, Adapter]:
    """Adapters in `folder/adapter` by the name of the weight they change; empty if there are none."""
    settings, weights = folder / "adapter" / "adapter_config.json", folder / "adapter" / "adapter_model.safetensors"
    if not (settings.is_file() and weights.is_file()):
        return {}
    values = json.loads(settings.read_text(encoding="utf-8"))
    return _adapters(load_file(weights), values["lora_alpha"] / values["r"])


def adapter_of_run(stage_folder: Path, config: AdjustSection) -> dict[str, Adapter]:
    """Adapters in the best checkpoint of stage 2's folder; empty if there are none."""
    best = list_checkpoints(stage_folder, "best")
    if config.method != "lora" or not best:
        return {}
    return _adapters(read_checkpoint(best[-1]).tensors["weights"], config.lora_alpha / config.lora_rank)


def lora_updates(adapters: dict[str, Adapter], weights: dict[str, Tensor]) -> list[dict[str, Any]]:
    """How far stage 2 moved each projection, from its first step to the weights that were kept.

    The paper's appendix sums the lengths of all steps instead; checkpoints do not hold the steps between.

    Args:
        weights: the projections before stage 2, by the adapters' names.

    Returns:
        For each adapter its layer and projection, norm = |scale B A|, weight_norm = |W|, relative = their
        quotient, and the norms of A and B alone (Frobenius).
    """
    rows = []
    for name, adapter in adapters.items():
        weight_norm = float(weights[name].float().norm()) if name in weights else None
        norm = adapter.norm()
        rows.append(
            {
                "layer": layer_of(name),
                "projection": name.split(".")[-2],
                "rank": adapter.a_RI.shape[0],
                "norm": norm,
                "weight_norm": weight_norm,
                "relative": norm / weight_norm if weight_norm else None,
                "a_norm": float(adapter.a_RI.float().norm()),
                "b_norm": float(adapter.b_OR.float().norm()),
            }
        )
    return rows


def layer_of(name: str) -> int:
    """The first number in a parameter's name; -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _adapters(tensors: dict[str, Tensor], scale: float) -> dict[str, Adapter]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key)
        if match is not None:
            sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = tensor
    return {name: Adapter(pair["A"], pair["B"], scale) for name, pair in sides.items() if len(pair) == 2}

"""One pass over data that shows every layer's attention under the weights of every stage.

All stages read the same hidden states, those of the model before stage 2 with its own softmax attention, as in
attention transfer. A stage whose projections differ gets its queries, keys and values by calling the attention
module again with the same arguments. So differences between stages are differences of the layer, not of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lolcats.analysis.stages import StageWeights
from lolcats.data import PackedDataset
from lolcats.modeling.call import AttentionCall
from lolcats.ops import attention_weights
from lolcats.ops.hybrid_attention.ragged import rows_from_mask, rows_from_segments


@dataclass
class Seen:
    """One layer's attention for one batch, under one stage's weights.

    Attributes:
        layer: index in the model.
        stage: name of the stage.
        module: the layer's `HybridAttention`, holding the stage's weights while this is looked at.
        q_BHTD, k_BGTD, v_BGTD: under the stage's projections.
        y_softmax_BHTD: the stage's own softmax attention.
        y_original_BHTD: softmax attention before stage 2, of the same hidden states.
        call: keyword arguments of the attention call (scale, softcap, mask, segment_ids, ...).
    """

    layer: int
    stage: str
    module: Any
    q_BHTD: Tensor
    k_BGTD: Tensor
    v_BGTD: Tensor
    y_softmax_BHTD: Tensor
    y_original_BHTD: Tensor
    call: dict[str, Any]

    @cached_property
    def y_hybrid_BHTD(self) -> Tensor:
        """The stage's hybrid attention."""
        call = {key: value for key, value in self.call.items() if key != "sliding_window"}
        return self.module(self.q_BHTD, self.k_BGTD, self.v_BGTD, **call)[0]

    @cached_property
    def position_BT(self) -> Tensor:
        """Each token's position in its own sequence or document; anything for padding."""
        return self._positions[0]

    @cached_property
    def real_BT(self) -> Tensor:
        """Bool: False for padding."""
        return self._positions[1]

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        batch, _, tokens, _ = self.y_softmax_BHTD.shape
        mask, segment_ids = self.call["mask"], self.call["segment_ids"]
        if mask is None and segment_ids is None:
            position_BT = torch.arange(tokens, device=self.y_softmax_BHTD.device).expand(batch, -1)
            return position_BT, torch.ones_like(position_BT, dtype=torch.bool)
        rows = rows_from_mask(mask) if segment_ids is None else rows_from_segments(segment_ids)
        return rows.target_BT % rows.source_NL.shape[1], rows.real_BT

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hybrid and softmax weights [N, H, L, L] and the lengths [N]; see `lolcats.ops.attention_weights`."""
        call = dict(self.call)
        scale = call.pop("scale")
        return attention_weights(
            self.q_BHTD,
            self.k_BGTD,
            self.module.config,
            self.module.params(call.pop("sink_logits")),
            scale=self.module.head_dim**-0.5 if scale is None else scale,
            **call,
        )


class Diagnostic(Protocol):
    """Something measured from what the layers show."""

    def see(self, seen: Seen) -> None:
        """Take one layer's attention of one batch under one stage."""

    def result(self) -> dict[str, Any]:
        """Plain numbers."""


@torch.no_grad()
def measure(
    weights: StageWeights,
    dataset: PackedDataset,
    diagnostics: Sequence[Diagnostic],
    *,
    batch_size: int = 1,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """The results of `diagnostics` over all sequences of `dataset`. The last stage's weights are left in the model.

    Args:
        batch_size: sequences at a time. Diagnostics that look at attention weights need
            batch_size * heads * T * T numbers several times over.
        on_batch: called with (sequences done, sequences in all).
    """
    pass_ = _Pass(weights, diagnostics)
    call = AttentionCall(mode="softmax", observe=pass_.observe)
    with pass_.hooked():
        weights.use(weights.names[0])
        try:
            for begin in range(0, len(dataset), batch_size):
                indices = list(range(begin, min(begin + batch_size, len(dataset))))
                batch = dataset.batch(indices)
                batch.pop("labels")
                inputs = {name: tensor.to(weights.model.device) for name, tensor in batch.items()}
                weights.model.get_decoder()(**inputs, use_cache=False, attention_call=call)
                if on_batch is not None:
                    on_batch(begin + len(indices), len(dataset))
        finally:
            weights.use(weights.last)
    return [diagnostic.result() for diagnostic in diagnostics]


class _Pass:
    def __init__(self, weights: StageWeights, diagnostics: Sequence[Diagnostic]) -> None:
        self.weights, self.diagnostics = weights, diagnostics
        self._observed: dict[str, Any] = {}

    def observe(self, **observed: Any) -> None:
        self._observed = observed

    def hooked(self) -> _Hooks:
        return _Hooks(self.weights.model.attention_modules(), self._after)

    def _after(self, name: str, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The attention module `name` has just run, with the first stage's weights."""
        under, first = f"{name}.", self.weights.names[0]
        original = dict(self._observed)
        for stage in self.weights.names:
            self.weights.use(stage, under=under)
            observed = original
            if self.weights.projections_differ(stage, first, under=under):
                attention.forward(*args, **kwargs)  # past the hooks; fills self._observed
                observed = dict(self._observed)
            seen = Seen(
                observed["layer_idx"],
                stage,
                observed["module"],
                observed["q"],
                observed["k"],
                observed["v"],
                observed["y_softmax"],
                original["y_softmax"],
                observed["call"],
            )
            for diagnostic in self.diagnostics:
                diagnostic.see(seen)
        self.weights.use(first, under=under)


class _Hooks:
    """Calls `after` behind each attention module, while the block lasts."""

    def __init__(self, modules: dict[str, nn.Module], after: Callable[..., None]) -> None:
        self.modules, self.after = modules, after
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.modules.items():

            def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any, name: str = name) -> None:
                self.after(name, module, args, kwargs)

            self.handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

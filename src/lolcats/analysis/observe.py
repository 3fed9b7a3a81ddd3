"""One pass over data that shows every layer's attention under the weights of every stage.

All stages read the same hidden states, those of the model before stage 2 with its own softmax attention, as in
attention transfer. A stage whose projections differ gets its queries, keys and values by calling the attention
module again with the same arguments. So differences between stages are differences of the layer, not of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lolcats.analysis.stages import StageWeights
from lolcats.data import PackedDataset
from lolcats.modeling.call import AttentionCall
from lolcats.ops import attention_weights


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
        call: keyword arguments of the attention call (scale, softcap, cu_seqlens, ...).
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

    @property
    def is_original(self) -> bool:
        """Whether the stage's softmax attention is that before stage 2."""
        return self.y_softmax_BHTD is self.y_original_BHTD

    @cached_property
    def y_hybrid_BHTD(self) -> Tensor:
        """The stage's hybrid attention."""
        call = {key: value for key, value in self.call.items() if key != "sliding_window"}
        return self.module(self.q_BHTD, self.k_BGTD, self.v_BGTD, **call)[0]

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hybrid and softmax weights [N, H, L, L] and the lengths [N]; see `lolcats.ops.attention_weights`."""
        call = dict(self.call)
        params = self.module.params(*(call.pop(name) for name in ("sink_logits", "scale", "softcap")))
        return attention_weights(self.q_BHTD, self.k_BGTD, self.module.config, params, **call)


@torch.no_grad()
def measure(
    weights: StageWeights,
    dataset: PackedDataset,
    see: Callable[[Seen], None],
    *,
    batch_size: int = 1,
) -> None:
    """Show all sequences of `dataset`. The last stage's weights are left in the model.

    Args:
        see: takes one layer's attention of one batch under one stage.
        batch_size: sequences at a time. Diagnostics that look at attention weights need
            batch_size * heads * T * T numbers several times over.
    """
    observed: dict[str, Any] = {}  # of the attention that ran last
    model, first = weights.model, weights.names[0]

    def after(name: str, attention: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """The attention module `name` has just run, with the first stage's weights."""
        under, original = f"{name}.", dict(observed)
        for stage in weights.names:
            weights.use(stage, under=under)
            own = original
            if weights.projections_differ(stage, first, under=under):
                attention.forward(*args, **kwargs)  # past the hooks; observed again
                own = dict(observed)
            see(
                Seen(
                    *(own["layer_idx"], stage, own["module"], own["q"], own["k"], own["v"], own["y_softmax"]),
                    *(original["y_softmax"], own["call"]),
                )
            )
        weights.use(first, under=under)

    call = AttentionCall(mode="softmax", observe=lambda **found: observed.update(found))
    with ExitStack() as stack:
        for name, module in model.attention_modules().items():
            stack.callback(module.register_forward_hook(partial(after, name), with_kwargs=True).remove)
        stack.callback(weights.use, weights.last)
        weights.use(first)
        for begin in range(0, len(dataset), batch_size):
            batch = dataset.batch(list(range(begin, min(begin + batch_size, len(dataset)))))
            batch.pop("labels")
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
            model.get_decoder()(**inputs, use_cache=False, attention_call=call)

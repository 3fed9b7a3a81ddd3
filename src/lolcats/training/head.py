"""The language-model head apart from the model: losses over the vocabulary at chosen positions, a part at a time.

Logits of a few thousand positions are made, used and dropped, part by part. The head is frozen: the gradient of the
features is computed together with the cross-entropy; divergences make their parts again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, kl_div, linear
from torch.utils.checkpoint import checkpoint

from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.sharding import gathered

PART_ELEMENTS = 2**27
"""Logits made at once: 256 MiB in bfloat16."""


@dataclass(frozen=True)
class LanguageHead:
    """From features [L, D] to logits [L, V].

    Attributes:
        module: the linear layer; None: the features are the logits.
        multiply, divide: factors of the logits (Cohere's logit_scale, Granite's logits_scaling).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
    """

    module: nn.Linear | None = None
    multiply: float | None = None
    divide: float | None = None
    softcap: float | None = None

    def __call__(self, features_LD: Tensor) -> Tensor:
        return self.finish(self.product(features_LD))

    def product(self, features_LD: Tensor) -> Tensor:
        """[L, V] what the linear layer gives."""
        return features_LD if self.module is None else linear(features_LD, self.module.weight, self.module.bias)

    def finish(self, product_LV: Tensor) -> Tensor:
        """[L, V] logits from `product`, in the models' own order of operations."""
        if self.divide is not None:
            product_LV = product_LV / self.divide
        if self.multiply is not None:
            product_LV = product_LV * self.multiply
        if self.softcap is not None:
            product_LV = torch.tanh(product_LV / self.softcap) * self.softcap
        return product_LV


@torch.no_grad()
def find_head(model: LolcatsForCausalLM) -> LanguageHead:
    """The model's head, if the decoder's output through it gives the model's logits bit for bit.

    Tried on a few tokens, so that no family's peculiarity is missed; otherwise a head without module.
    """
    module = model.get_output_embeddings()
    config = model.config.text_config
    if type(module) is not nn.Linear and not (isinstance(module, FSDPModule) and isinstance(module, nn.Linear)):
        return LanguageHead()
    head = LanguageHead(
        module,
        multiply=getattr(config, "logit_scale", None),
        divide=getattr(config, "logits_scaling", None),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
    training = model.training
    model.eval()
    try:
        tokens_BT = torch.arange(min(8, module.out_features), device=model.device)[None]
        features_BTD = model.get_decoder()(input_ids=tokens_BT, use_cache=False, attention_call=SOFTMAX)[0]
        logits_BTV = model(input_ids=tokens_BT, use_cache=False, attention_call=SOFTMAX).logits
    finally:
        model.train(training)
    with gathered(module):
        same = features_BTD.shape[-1] == module.in_features and torch.equal(head(features_BTD), logits_BTV)
    return head if same else LanguageHead()


def head_inputs(
    model: LolcatsForCausalLM, head: LanguageHead, inputs: dict[str, Tensor], row_L: Tensor, call: AttentionCall
) -> Tensor:
    """[L, D] what the head gets at the given rows of B * T; [L, V] logits if it cannot be called apart."""
    if head.module is None:
        output_BTD = model(**inputs, use_cache=False, attention_call=call).logits
    else:
        output_BTD = model.get_decoder()(**inputs, use_cache=False, attention_call=call)[0]
    return output_BTD.flatten(0, 1).index_select(0, row_L)


def part_size(vocabulary: int) -> int:
    """Positions whose logits are made at once."""
    return max(256, PART_ELEMENTS // vocabulary // 256 * 256)


def weighted_cross_entropy(
    features_LD: Tensor, label_L: Tensor, weight_L: Tensor, head: LanguageHead, *, part: int
) -> Tensor:
    """Sum over L positions of weight times cross-entropy (nats) of the label; a float32 scalar."""
    if head.module is not None:
        # With their gradient and in float32, logits take seven times the memory.
        return _FrozenHeadLoss.apply(features_LD, label_L, weight_L, head, max(part // 4, 1))

    def loss(features: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        return (cross_entropy(head(features).float(), label, reduction="none") * weight).sum()

    return _in_parts(loss, part, features_LD, label_L, weight_L)


def weighted_losses(
    features_LD: Tensor,
    teacher_LD: Tensor,
    label_L: Tensor,
    weight_L: Tensor,
    head: LanguageHead,
    *,
    share: float,
    part: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(1 - share) cross-entropy + share KL(teacher || student), and both, which have no gradient: each the sum over L
    positions of weight times nats, a float32 scalar.

    Args:
        teacher_LD: the teacher's features, for the same head.
    """

    def loss(features: Tensor, teacher: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        student_LV = head(features).float().log_softmax(-1)
        teacher_LV = head(teacher).float().log_softmax(-1)
        divergence_LV = kl_div(student_LV, teacher_LV, reduction="none", log_target=True)
        divergence = (divergence_LV.sum(-1) * weight).sum()
        learnt_LV = student_LV.detach() if share == 1 else student_LV  # it is only reported then
        entropy = -(learnt_LV.gather(1, label[:, None])[:, 0] * weight).sum()
        whole = divergence if share == 1 else (1 - share) * entropy + share * divergence
        return torch.stack([whole, entropy.detach(), divergence.detach()])

    found = _in_parts(loss, part, features_LD, teacher_LD, label_L, weight_L)
    return found[0], found[1].detach(), found[2].detach()


def _in_parts(loss: Callable[..., Tensor], part: int, *tensors: Tensor) -> Tensor:
    """Sum of losses over parts of the first dimension; each part's logits live only while it runs."""
    total: Any = tensors[0].new_zeros((), dtype=torch.float32)
    for parts in zip(*(tensor.split(part) for tensor in tensors), strict=True):
        # Nothing in it is random, and the state of a generator cannot be read while a graph is captured.
        total = total + checkpoint(loss, *parts, use_reentrant=False, preserve_rng_state=False)
    return total


class _FrozenHeadLoss(torch.autograd.Function):
    """`weighted_cross_entropy` with the gradient of the features; the head gets none."""

    @staticmethod
    def forward(
        ctx: Any, features_LD: Tensor, label_L: Tensor, weight_L: Tensor, head: LanguageHead, part: int
    ) -> Tensor:
        assert head.module is not None
        matrix_VD = head.module.weight
        wanted = ctx.needs_input_grad[0]
        loss_L = torch.empty(len(label_L), dtype=torch.float32, device=features_LD.device)
        gradient_LD = torch.empty_like(features_LD) if wanted else None
        for begin in range(0, len(label_L), part):
            span = slice(begin, begin + part)
            with torch.set_grad_enabled(wanted):
                product_LV = head.product(features_LD[span].detach()).requires_grad_(wanted)
                part_L = cross_entropy(head.finish(product_LV).float(), label_L[span], reduction="none")
            loss_L[span] = part_L.detach()
            if gradient_LD is not None:
                (gradient_LV,) = torch.autograd.grad(part_L, product_LV, torch.ones_like(part_L))
                # The weights come after the product: in half precision they could underflow in its factor.
                gradient_LD[span] = (gradient_LV @ matrix_VD) * weight_L[span, None]
        if gradient_LD is not None:
            ctx.save_for_backward(gradient_LD)
        return (loss_L * weight_L).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_LD,) = ctx.saved_tensors
        return gradient_LD * gradients[0].to(gradient_LD.dtype), None, None, None, None

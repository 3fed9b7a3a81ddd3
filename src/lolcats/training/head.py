"""The language-model head apart from the model: logits of chosen positions only, a part at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

from lolcats.modeling.call import SOFTMAX
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.parallel.sharding import gathered


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

    @property
    def frozen(self) -> bool:
        return self.module is not None and not any(p.requires_grad for p in self.module.parameters())

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

"""Self-speculative decoding: a model drafts tokens from a part of its own cache, and checks them with all of it.

The draft has the model's weights and reads the model's keys and values: KV heads that recall needs look at all tokens,
the others at the first few and the last ones. There is no second cache and no state; a rejected token is a length moved
back. A step of decoding reads weights and cache; k drafts and one check read the whole cache once and not k + 1 times.

Sources: speculative decoding, arXiv:2211.17192 and arXiv:2302.01318; sinks and a window as what a head reads,
arXiv:2309.17453; a model's own cache, read in part, as its draft, arXiv:2404.11912 and arXiv:2408.11049.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lolcats.config.attention import AttentionConfig
from lolcats.errors import UserError
from lolcats.generation.drafting import EVERY, Acceptance, PassCosts, counts_to, gain
from lolcats.modeling.cache_size import native_window
from lolcats.modeling.call import AttentionCall, Reach
from lolcats.modeling.configuration import LolcatsConfig
from lolcats.modeling.heads import named_heads
from lolcats.modeling.model import LolcatsForCausalLM

PRIOR = 0.8  # acceptance before any token was drafted


@dataclass(frozen=True)
class Draft:
    """What the draft reads of the model's cache.

    Attributes:
        exact: the KV heads that read all tokens, named as in `AttentionConfig.exact`; layers with a native window read
            what they always do.
        window: tokens that the others look back at, their own included.
        sinks: first tokens of a sequence that they see, too.
        most: most tokens drafted in a round.
        adapt: draft fewer, or none, where acceptance and the cache's length say that more do not pay.

    Raises:
        ValueError: no names of heads, or a number out of range.
    """

    exact: tuple[str, ...] = ()
    window: int = 512
    sinks: int = 4
    most: int = 8
    adapt: bool = True

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("most", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"draft: {name}={getattr(self, name)}; expected at least {least}")
        named = AttentionConfig(exact=self.exact)
        if named.exact_budget is not None:
            raise ValueError(f"draft: {named.exact_budget} is a budget; name the heads that it buys (7.2,8,20-22)")
        object.__setattr__(self, "exact", tuple(map(str, named.exact)))

    @classmethod
    def read(cls, source: str | Path, **settings: Any) -> Draft:
        """From the folder of a linearized model, whose exact heads it takes; or heads written out, or `window`: none.

        Raises:
            UserError: no such folder, or not of a linearized model; or as `Draft`.
        """
        text = str(source)
        if text == "window":
            return cls(**settings)
        folder = Path(text).expanduser()
        if folder.is_dir():
            names = _heads_of(folder)
        elif text[:1].isdigit():
            names = tuple(name.strip() for name in text.split(","))
        else:
            raise UserError(
                f"draft: {text} is no folder; expected that of a linearized model, heads such as 7.2,8 as"
                " `lolcats select-heads` prints them, `window`, or `lookup`"
            )
        try:
            return cls(names, **settings)
        except ValueError as error:
            raise UserError(str(error)) from error


def _heads_of(folder: Path) -> tuple[str, ...]:
    """The exact heads of a linearized model's folder."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"draft: cannot read {folder / 'config.json'}: {error}") from error
    if values.get("model_type") != LolcatsConfig.model_type:
        raise UserError(f"draft: {folder} holds a {values.get('model_type')} model; expected a linearized one")
    return tuple(values["attention"]["exact"])


class Speculation:
    """A draft for one model: what its passes read, and how many tokens a round drafts.

    Args:
        model: all of whose heads have softmax attention over all tokens, or a native window.

    Attributes:
        draft: the attention of a pass of the draft.
        acceptance: of drafted tokens lately.

    Raises:
        UserError: the draft does not fit the model, or the model cannot take tokens back.
    """

    def __init__(self, model: LolcatsForCausalLM, settings: Draft) -> None:
        self.settings = settings
        layers = {layer.index: layer for layer in model.config.layer_heads}
        heads = {index: layer.num_kv_heads for index, layer in layers.items()}
        exact = named_heads(settings.exact, heads, "the model")
        device: Any = model.get_input_embeddings().weight.device
        if model.config.linear_layers or model.config.attention.exact_tokens is not None:
            raise UserError(
                "a model drafts from a part of its own cache if all heads have softmax attention; this one has linear"
                " heads, or exact heads with a window. Take --draft lookup, or load the original model and give the"
                " linearized one as --draft"
            )
        drafted: dict[int, Reach] = {}
        self.costs, self.acceptance = PassCosts(model), Acceptance(PRIOR)
        self._draft_kinds: list[tuple[int, int]] = []
        for index, layer in layers.items():
            size = 2 * layer.head_dim * model.dtype.itemsize
            if (window := native_window(model.config, layer)) is not None:
                self._draft_kinds.append((size * layer.num_kv_heads, window))
                continue
            whole = len(exact[index])
            tokens = [EVERY if head in exact[index] else settings.window for head in range(layer.num_kv_heads)]
            if whole < layer.num_kv_heads:
                drafted[index] = Reach(torch.tensor(tokens, device=device), settings.sinks)
            self._draft_kinds.append((size * whole, EVERY))
            self._draft_kinds.append((size * (len(tokens) - whole), settings.window + settings.sinks))
        self.draft = AttentionCall(reach=drafted)

    def tokens(self, lengths: Sequence[int], drafting: int) -> int:
        """How many to draft: what yields most tokens for what the passes read, by the acceptance lately.

        Args:
            lengths: of the rows.
            drafting: rows that can use a draft.
        """
        if not drafting or not self.settings.adapt:
            return self.settings.most if drafting else 0
        rate, share = self.acceptance.rate, drafting / len(lengths)
        return max(counts_to(self.settings.most), key=lambda count: self.speed_up(rate, count, lengths, share))

    def speed_up(self, rate: float, count: int, lengths: Sequence[int], share: float = 1.0) -> float:
        """Tokens in the time of one step if so many are drafted, by what the passes read; a prediction.

        Args:
            rate: chance of a drafted token to be accepted.
            share: of the rows, those that can use a draft.
        """
        cost = count * self.costs.of(lengths, 1, self._draft_kinds) + self.costs.of(lengths, count + 1)
        step = self.costs.of(lengths, 1)
        return (1 + share * gain(rate, count)) * (step + self.costs.round) / (cost + self.costs.round)

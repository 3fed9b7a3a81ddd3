"""What a linearized model and its softmax original cost by the length of a text: time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from lolcats.modeling.cache_size import cache_sizes
from lolcats.modeling.call import HYBRID, SOFTMAX, AttentionCall
from lolcats.modeling.compat import CACHE
from lolcats.modeling.model import LolcatsForCausalLM

LENGTHS = (256, 1024, 4096, 16384)
STEPS = 4  # timed after each prompt, of which the fastest counts
BUDGET_S = 60.0


@torch.no_grad()
def speed_by_length(
    model: LolcatsForCausalLM, lengths: tuple[int, ...] = LENGTHS, budget_s: float = BUDGET_S
) -> dict[str, Any]:
    """One sequence of random tokens, in transformers without CUDA graphs; `lolcats bench decode` measures the engine.

    Args:
        lengths: of prompts, increasing; those beyond the model's positions are skipped.
        budget_s: a length is skipped, with all longer ones, where it is likely to take longer than is left.

    Returns:
        rows: of each length, `tokens`, and of the model (linear) and the same weights with softmax attention in all
        heads (softmax) `prompt_s`, `step_ms` and `cache_bytes`; `device`, `dtype` and `threads`; `left_out`: lengths.
    """
    model.eval()
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or max(lengths)
    end_s = time.perf_counter() + budget_s
    rows: list[dict[str, Any]] = []
    took_s = 0.0
    _measure(model, HYBRID, 16)  # loads and compiles what all lengths need
    _measure(model, SOFTMAX, 16)
    for tokens in lengths:
        growth = (tokens / rows[-1]["tokens"]) ** 1.5 if rows else 1.0  # products like the length, softmax its square
        if tokens + STEPS > most or time.perf_counter() + took_s * growth > end_s:
            break
        began_s = time.perf_counter()
        sizes = cache_sizes(model.config, tokens, model.dtype)
        row: dict[str, Any] = {"tokens": tokens}
        for name, call, size in zip(("linear", "softmax"), (HYBRID, SOFTMAX), sizes, strict=True):
            row[name] = _measure(model, call, tokens) | {"cache_bytes": size}
        took_s = time.perf_counter() - began_s
        rows.append(row)
    device = model.device
    return {
        "rows": rows,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "left_out": list(lengths[len(rows) :]),
    }


def _measure(model: LolcatsForCausalLM, call: AttentionCall, tokens: int) -> dict[str, float]:
    """Seconds of a prompt, and milliseconds of the fastest step after it."""
    target: Any = model
    given: dict[str, Any] = {"use_cache": True}
    if call is SOFTMAX:  # with keys and values in transformers' own cache
        target = model.model
        given |= {"attention_call": call, CACHE: DynamicCache(config=target.config)}
    generator = torch.Generator().manual_seed(0)
    token_1T = torch.randint(model.config.get_text_config().vocab_size, (1, tokens + 1), generator=generator)
    token_1T = token_1T.to(model.device)

    def run(token_1T: torch.Tensor, **more: Any) -> Any:
        return target(input_ids=token_1T, logits_to_keep=1, **given | more)

    output, prompt_s = _timed(lambda: run(token_1T[:, :-1]), model.device)
    times_s = [_timed(lambda: run(token_1T[:, -1:], **{CACHE: output[CACHE]}), model.device)[1] for _ in range(STEPS)]
    return {"prompt_s": prompt_s, "step_ms": 1e3 * min(times_s)}


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result, and seconds until the device has it."""
    waits = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    waits()
    began_s = time.perf_counter()
    result = function()
    waits()
    return result, time.perf_counter() - began_s

"""docs/models.md from the families that the tests run; `python tests/modeling/models_page.py` writes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from family_models import FAMILIES, NOT_SERVED_BY_VLLM, build, tokens
from transformers import PreTrainedModel

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.modeling.call import SOFTMAX
from lolcats.modeling.layer import HybridAttention
from lolcats.ops.hybrid_attention.kernels import support

FILE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD_DIM = 64  # of real models; the tests' are too small for the kernels
TESTS = {
    "converted": "test_a_window_over_everything_equals_the_original",
    "cached decoding": "test_pieces_through_a_cache_equal_the_whole",
    "padded batch": "test_a_padded_batch_equals_each_sequence_alone",
    "export": "test_the_saved_folder_reloads_exactly",
}
"""Columns, and the tests in test_families.py that every family passes for them."""
COLUMNS = ["family", "`model_type`", *TESTS, "kernels", "vLLM"]

TEXT = """# Models

## What other code may do with one

Each row is a test, in `tests/modeling/test_as_others_use_it.py` unless named.

| use | |
|---|---|
| `AutoModel`, `AutoModelForSequenceClassification`, `pipeline` | also from an exported folder, without this package |
| `base_model`, `generate(inputs_embeds=...)`, padding without `position_ids` | as on the original |
| PEFT, TRL 1.16: SFT, DPO, GRPO | `tests/training/test_trl.py` |
| quantized checkpoints | `tests/pipeline/test_quantised.py` |
| `generate_batch`, paged or quantized caches, `crop`, assisted decoding, `set_attn_implementation` | rejected by name |

## Families

Families that the tests run, each as a tiny model with random weights. `model_type` stands in a checkpoint's
`config.json`. Others convert too if their attention goes through transformers' attention interface with rotary
positions; what cannot be converted is refused by name, with the reason, before its weights are loaded.

- **converted**: with a window over the whole sequence the model equals the original. Kinds of layers that are kept stay
  as they are; `attention.sliding_layers=linearize` replaces those with a sliding window too. What else holds for
  [hybrids](architecture.md#hybrids), which keep layers of linear attention or convolutions, stands there.
- **cached decoding**: a sequence in pieces through a cache equals the whole.
- **padded batch**: each sequence equals itself alone, whatever side the padding is on.
- **export**: the saved folder reloads exactly.
- **kernels**: where the GPU kernels take the family's attention, both being training and prefill, and decoding;
  elsewhere `chunked` computes it, slower.
- **vLLM**: served by the plugin with transformers' answers; empty: refused by it, or vLLM's own softmax model of the
  tiny configuration does not give them either (Cohere 2, Ministral 3, Apertus, MiniMax-M2; vLLM 0.32).
  `lolcats serve --engine lolcats` serves every family.

"""


def row(family: str, original: PreTrainedModel) -> str:
    """The family's line of the table."""
    model = convert(original, AttentionConfig())
    text_config = model.config.text_config
    linear = {layer.index for layer in model.config.linear_layers}
    kinds = getattr(text_config, "layer_types", None) or []
    kept = sorted({kind for index, kind in enumerate(kinds) if index not in linear})
    converted = "yes" if not kept else f"yes, keeps {', '.join(kept)}".replace("_", " ")
    tested = dict.fromkeys(TESTS, "yes") | {"converted": converted}
    vllm = "" if family in NOT_SERVED_BY_VLLM else "yes"
    return line([family, f"`{text_config.model_type}`", *tested.values(), kernels(model), vllm])


def kernels(model: Any) -> str:
    """Calls that the kernels take, of a head_dim and type that they know, whatever this machine has."""
    taken = []

    def observe(module: HybridAttention, q: torch.Tensor, k: torch.Tensor, call: dict[str, Any], **_: Any) -> None:
        heads, kv_heads = q.shape[1], k.shape[1]
        q_BHTD, k_BGTD = (torch.zeros(1, number, 1, HEAD_DIM, dtype=torch.bfloat16) for number in (heads, kv_heads))
        params = HybridAttention(module.config, heads, kv_heads, HEAD_DIM).params(call["sink_logits"])
        arguments = q_BHTD, k_BGTD, k_BGTD, module.config, params
        with mock.patch.object(support, "_any_device", return_value=None):
            taken.append(
                (
                    support.supports(*arguments) is None,
                    support.supports_step(*arguments, state=None) is None,
                )
            )

    with torch.no_grad():
        model(tokens(1, 4), use_cache=False, attention_call=replace(SOFTMAX, observe=observe))
    whole, step = map(all, zip(*taken, strict=True))
    return {(True, True): "both", (False, True): "decoding", (True, False): "training, prefill"}.get((whole, step), "")


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(rows: list[str]) -> str:
    return TEXT + "\n".join([line(COLUMNS), "|" + "---|" * len(COLUMNS), *rows]) + "\n"


if __name__ == "__main__":
    FILE.write_text(page([row(family, build(family)) for family in FAMILIES]), encoding="utf-8")

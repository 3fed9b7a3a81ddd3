"""Families whose attention the plugin exchanges, as tiny models with all that is special about them."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from family_models import FAMILIES, NOT_SERVED_BY_VLLM, build, linearized
from vllm_kit import PROMPTS, Answer, assert_same, export_random, transformers_answers

from lolcats.errors import UserError

# Heads of sizes that vLLM's CPU attention has, and the tokenizer's vocabulary.
SHAPE = {"vocab_size": 260, "hidden_size": 128, "intermediate_size": 64, "initializer_range": 0.1}
HEADS = {
    "gemma4": {"global_head_dim": 64},
    "gemma4-shared-keys": {"global_head_dim": 64, "vocab_size_per_layer_input": 260},
    "gpt-neox": {"num_key_value_heads": 4},  # it has no others, but vLLM reads the setting
}
EXACT = {"linear": {}, "exact-head": {"exact": ("1.0",)}}
BOUNDED = {"exact": ("1.0",), "exact_window": 12, "sinks": 1}
SHORT, NEW_TOKENS = PROMPTS[:6], 8
WITH_SCORES = ["gemma2", "gpt-oss"]  # a softcap, and scores of sinks
SERVED = [family for family in FAMILIES if family not in NOT_SERVED_BY_VLLM]


def make_folder(family: str, path: Path, **attention: Any) -> Path:
    shape = SHAPE | ({"head_dim": 32} if "head_dim" in FAMILIES[family][1] else {}) | HEADS.get(family, {})
    return export_random(linearized(build(family, **shape), window_size=8, **attention), path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[tuple[str, str], tuple[Path, list[Answer]]]:
    """Folders and answers; made before any engine starts, as vLLM changes classes of transformers in this process."""
    made = {}
    for family in SERVED:
        kinds = EXACT | ({"bounded": BOUNDED} if family in WITH_SCORES else {})
        for kind, attention in kinds.items():
            path = make_folder(family, tmp_path_factory.mktemp(family), **attention)
            made[family, kind] = path, transformers_answers(path, NEW_TOKENS, len(SHORT), of_prompts=True)
    return made


@pytest.mark.parametrize(
    ("family", "kind"), [*product(SERVED, EXACT), *((family, "bounded") for family in WITH_SCORES)]
)
def test_family(expected, serve, family, kind) -> None:
    path, answers = expected[family, kind]
    assert_same(serve(path, max_model_len=128).answers(SHORT, NEW_TOKENS, of_prompts=True), answers)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm2-moe", "'lfm2_moe' has layers without attention.*lolcats serve"),
        ("gemma4-shared-keys", "'gemma4_text': .*layers.2.* attends over the keys of an earlier layer"),
    ],
)
def test_refused(tmp_path, serve, family, reason) -> None:
    with pytest.raises(UserError, match=reason):
        serve(make_folder(family, tmp_path), max_model_len=128)

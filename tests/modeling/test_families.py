"""Every supported family: the converted model equals the original, itself in pieces, and itself reloaded."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import torch
from family_models import TOLERANCE
from transformers import AutoModelForCausalLM

from lolcats.config import AdjustSection, TransferSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.data import PackedDataset
from lolcats.modeling.attention import SOFTMAX
from lolcats.training.attention_transfer import TransferStage
from lolcats.training.finetune import AdjustStage


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def test_native_windows_count_padding_as_the_original_does(kit):
    """Layers that stay: the same in one pass and in pieces, whatever padding stands between a row's tokens."""
    original = kit.build("gemma3")
    model = kit.linearized(original, window="terraced", window_size=6)
    input_ids, sizes = kit.tokens(2, 40), [9, 1, 16, 1, 1, 12]
    mask = kit.padding([40, 31], 40)
    mask[0, 10:14] = mask[1, 20:29] = 0
    whole = kit.in_pieces(model, input_ids, [40], mask)[0]
    uncached = model(input_ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=False).logits
    for logits in (kit.in_pieces(model, input_ids, sizes, mask)[0], uncached):
        torch.testing.assert_close(logits[mask.bool()], whole[mask.bool()], **TOLERANCE)


@torch.no_grad()
def test_a_window_over_everything_equals_the_original(original, family, kit):
    model = kit.linearized(original, window="terraced", window_size=20)
    input_ids = kit.tokens(2, 20)
    torch.testing.assert_close(model(input_ids).logits, original(input_ids).logits, **TOLERANCE)
    mask = kit.padding([20, 13], 20)
    inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids(mask)}
    real = mask.bool()
    torch.testing.assert_close(model(**inputs).logits[real], original(**inputs).logits[real], **TOLERANCE)


@torch.no_grad()
def test_a_small_window_differs_from_the_original(original, small_window, kit):
    """The test above compares something: linear attention is not softmax attention."""
    input_ids = kit.tokens(2, 20)
    difference = (small_window(input_ids).logits - original(input_ids).logits).abs()
    assert difference[:, :4].max() < 1e-3
    assert difference[:, 8:].max() > 1e-2


@torch.no_grad()
def test_softmax_mode_equals_the_original(original, small_window, kit):
    input_ids = kit.tokens(2, 32)
    mask = kit.padding([32, 22], 32)  # a single token counts as real for the base models' recurrent layers
    padded = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids(mask)}
    softmax = partial(small_window, attention_call=SOFTMAX)
    softmax.config = small_window.config
    alone = softmax(input_ids).logits
    together = softmax(**padded).logits
    cached, _ = kit.in_pieces(softmax, input_ids, [10, 1, 1, 15, 1, 4])
    cached_padded, _ = kit.in_pieces(softmax, input_ids, [10, 1, 1, 15, 1, 4], mask)
    expected = original(input_ids).logits
    expected_padded = original(**padded).logits[mask.bool()]
    torch.testing.assert_close(alone, expected, **TOLERANCE)
    torch.testing.assert_close(cached, expected, **TOLERANCE)
    torch.testing.assert_close(together[mask.bool()], expected_padded, **TOLERANCE)
    torch.testing.assert_close(cached_padded[mask.bool()], expected_padded, **TOLERANCE)


@torch.no_grad()
def test_a_padded_batch_equals_each_sequence_alone(small_window, kit):
    input_ids = kit.tokens(3, 24)
    for side in ("left", "right"):
        mask = kit.padding([24, 11, 1], 24, side)
        logits = small_window(input_ids, attention_mask=mask, position_ids=position_ids(mask)).logits
        for row in range(3):
            real = mask[row].bool()
            alone = small_window(input_ids[row, real][None]).logits[0]
            torch.testing.assert_close(logits[row, real], alone, **TOLERANCE)


@torch.no_grad()
def test_pieces_through_a_cache_equal_the_whole(small_window, kit):
    input_ids = kit.tokens(2, 24)
    whole = small_window(input_ids, use_cache=False).logits
    for sizes in ([24], [7, 6, 11], [10, *[1] * 14]):
        pieces, cache = kit.in_pieces(small_window, input_ids, sizes)
        torch.testing.assert_close(pieces, whole, **TOLERANCE)
        assert cache.get_seq_length() == 24
    mask = kit.padding([24, 11], 24)
    whole = small_window(input_ids, attention_mask=mask, position_ids=position_ids(mask)).logits
    pieces, _ = kit.in_pieces(small_window, input_ids, [5, 8, *[1] * 11], mask)
    torch.testing.assert_close(pieces[mask.bool()], whole[mask.bool()], **TOLERANCE)


@torch.no_grad()
def test_the_saved_folder_reloads_exactly(small_window, kit, tmp_path):
    dtype = torch.bfloat16  # feature maps stay float32
    small_window.save_pretrained(tmp_path / "trained")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(small_window)
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() == small_window.state_dict().keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
        trained = small_window.state_dict()[name]
        assert torch.equal(tensor, trained if "linear_attention" in name else trained.to(tensor.dtype)), name
    assert next(loaded.linear_layers())[1].q_weight.dtype == torch.float32
    input_ids = kit.tokens(2, 16)
    assert torch.equal(model(input_ids).logits, loaded(input_ids).logits)


def test_the_page_of_models_has_the_family(family, original, kit):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text().splitlines()
    config = convert(copy.deepcopy(original), AttentionConfig()).config
    linear, kinds = {layer.index for layer in config.linear_layers}, getattr(config.text_config, "layer_types", None)
    kept = sorted({kind for index, kind in enumerate(kinds or []) if index not in linear})
    vllm = "" if family in kit.NOT_SERVED_BY_VLLM else "yes"
    cells = family, f"`{config.text_config.model_type}`", ", ".join(kept).replace("_", " "), vllm
    assert f"| {' | '.join(cells)} |" in page
    assert len(page) - page.index("|---|---|---|---|") - 1 == len(kit.FAMILIES)


def test_both_stages_learn_in_the_linear_layers_alone(original, kit):
    """Two updates on positions that are ahead of their tokens and jump; base weights stay, of all kinds of layers."""
    model = kit.linearized(original, window_size=3)
    input_ids = kit.tokens(2, 16).int().numpy()
    data = PackedDataset(input_ids, np.arange(16) > np.zeros((2, 1)), position_offset=20, position_jumps=1)
    size = {"batch_size": 2, "micro_batch_size": 2}
    lora = AdjustSection(**size, lora_rank=2, lora_targets=["q", "o"])  # Gemma 4 shares keys and values
    for make, section in ((TransferStage, TransferSection(**size)), (AdjustStage, lora)):
        stage = make(model, section, data)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.Adam([p for block in stage.blocks() for p in block.values()], lr=1e-3)
        losses = []
        for _ in range(3):
            losses.append(float(stage.micro_step(data.batch(range(2)), 1.0)["loss"]))
            optimizer.step()
            optimizer.zero_grad()
        assert losses[2] < losses[1] < losses[0]
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert all("linear_attention" in name or "lora" in name for name in changed)
        for layer in model.config.linear_layers:
            assert any(name.startswith(f"model.{layer.module}.") for name in changed)

"""Masks, packed documents and observers."""

from functools import partial

import pytest
import torch
from family_models import TOLERANCE

from lolcats.modeling import attention
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.softmax import softmax_attention

LENGTHS = [7, 1, 12]
SOME = ["llama3", "phi1.5", "gemma2", "gpt-neox", "cohere", "afmoe", "gpt-oss"]
some_families = pytest.mark.parametrize("family", SOME, scope="module")


@torch.no_grad()
@some_families
@pytest.mark.parametrize("mode", ["hybrid", "softmax"])
def test_packed_documents_equal_each_document_alone(kit, small_window, mode):
    input_ids = kit.tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    for module in (small_window, small_window.get_decoder()):  # as the model is called, and as stage 1 calls it
        run = partial(module, use_cache=False, attention_call=AttentionCall(mode=mode))
        alone = torch.cat([run(input_ids=part)[0] for part in input_ids.split(LENGTHS, dim=1)], dim=1)
        torch.testing.assert_close(run(input_ids=input_ids, position_ids=positions)[0], alone, **TOLERANCE)


@torch.no_grad()
@some_families
@pytest.mark.parametrize("mode", ["hybrid", "softmax"])
def test_positions_may_jump_within_a_document(kit, small_window, mode):
    """Against the same positions with a mask, which transformers never divides into documents."""
    model, input_ids = small_window, kit.tokens(2, 20)
    positions = torch.stack([torch.arange(20) + 3, torch.arange(20) + 9 * (torch.arange(20) > 11)])
    call = {"attention_call": AttentionCall(mode=mode)}
    masked = {"position_ids": positions, "attention_mask": torch.ones(2, 20).long()}
    for module in (model, model.get_decoder()):  # as the model is called, and as training calls it
        expected = module(input_ids, **masked, use_cache=False, **call)[0]
        found = module(input_ids, rotary_positions=positions, use_cache=False, **call)[0]
        torch.testing.assert_close(found, expected, **TOLERANCE)
    expected = model(input_ids, **masked, **call).logits
    wrong = model(input_ids, position_ids=positions, **call).logits  # the second row's jump begins a document
    torch.testing.assert_close(wrong[:, :12], expected[:, :12], **TOLERANCE)
    assert (wrong[1, 12:] - expected[1, 12:]).abs().max() > 1e-3


@torch.no_grad()
def test_masks_that_linear_attention_cannot_express_are_refused(make_linear, kit):
    model, input_ids = make_linear(), kit.tokens(1, 6)
    with pytest.raises(ValueError, match="4 dimensions"):
        model(input_ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="4 dimensions"):
        attention.lolcats_mask(1, 6, 6, use_vmap=True)
    with pytest.raises(ValueError, match="up to 16 tokens"):
        kit.linearized(kit.build("llama4", attention_chunk_size=16))(kit.tokens(1, 17))
    softmax_layer = make_linear(exact=[0])
    with pytest.raises(ValueError, match="4 dimensions"):
        softmax_layer(input_ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())
    _, cache = kit.in_pieces(softmax_layer, input_ids, [6])
    for columns in (1, 6):  # padding, and none
        with pytest.raises(ValueError, match=rf"is \[1, {columns}\], not \[2, 6\]"):
            model(kit.tokens(2, 6), attention_mask=torch.ones(1, columns).long())
    with pytest.raises(ValueError, match="with cached tokens"):
        softmax_layer(input_ids[:, :1], attention_mask=torch.zeros(1, 1).long(), past_key_values=cache)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama3", "mixtral", "qwen3-next"])
def test_padding_is_taken_out_at_the_entry_and_put_back(kit, family, side):
    """Of all that the decoder returns, and of gradients; layers of hybrid models know no sequences in a row."""
    model, (tokens, mask) = (
        kit.linearized(kit.build(family), window_size=3),
        (kit.tokens(2, 9), kit.padding([9, 5], 9, side)),
    )
    shapes, embedded = [], model.get_input_embeddings()(tokens).detach().requires_grad_()
    for layer in model.get_decoder().layers:
        layer.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[:2]))
    returned = {"output_hidden_states": True} | ({"output_router_logits": True} if family == "mixtral" else {})
    found = model(inputs_embeds=embedded, attention_mask=mask, use_cache=False, **returned)
    assert set(shapes) == {(2, 9) if family == "qwen3-next" else (1, 14)}
    real, alone = mask.bool(), tokens[1, mask[1].bool()][None]
    expected = model(alone, use_cache=False, **returned)
    for hidden, one in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(hidden[1, real[1]], one[0], **TOLERANCE)
    if family == "mixtral":
        for logits, one in zip(found.router_logits, expected.router_logits, strict=True):
            torch.testing.assert_close(logits.unflatten(0, (2, 9))[1, real[1]], one, **TOLERANCE)
        assert found.aux_loss.isfinite()
    found.logits[real].square().sum().backward()
    assert (embedded.grad.abs().sum(-1) > 0).equal(real)


@torch.no_grad()
def test_a_piece_that_is_all_padding(make_linear, kit):
    model, tokens, mask = make_linear(exact=["0.1", "1"]), kit.tokens(2, 9), kit.padding([5, 3], 9)
    pieces, _ = kit.in_pieces(model, tokens, [3, 2, 4], mask)
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(pieces[mask.bool()], whole[mask.bool()], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama3", "gemma2", "gpt-oss", "gpt-neox"])
def test_observers_see_what_the_layer_sees(kit, family):
    """The softmax output that they get comes from the tensors and settings that they get."""
    model = kit.linearized(kit.build(family), window_size=2, sliding_layers="linearize")
    input_ids, mask = kit.tokens(2, 12), kit.padding([12, 7], 12)
    seen = {}

    def observe(layer):
        seen[layer.layer_idx] = layer

    expected = model(input_ids, attention_mask=mask, attention_call=SOFTMAX).logits
    call = AttentionCall(mode="softmax", observe=observe)
    observed = model(input_ids, attention_mask=mask, use_cache=False, attention_call=call).logits
    assert torch.equal(observed[mask.bool()], expected[mask.bool()])
    tokens = int(mask.sum())
    assert {index: layer.module for index, layer in seen.items()} == dict(model.linear_layers())
    for module, _, q, k, v, y_softmax, scoring, visible in seen.values():
        assert q.shape == (1, module.num_heads, tokens, module.head_dim)
        torch.testing.assert_close(softmax_attention(q, k, v, scoring, visible), y_softmax, **TOLERANCE)
        y, _ = module(q, k, v, scoring, cu_seqlens=visible.cu_seqlens)
        # the first block of the terrace is softmax attention
        torch.testing.assert_close(y[0, :, :2], y_softmax[0, :, :2], **TOLERANCE)


def test_dropout_is_applied_by_softmax_layers_only(make_linear, kit):
    model, input_ids = make_linear(exact=[0]), kit.tokens(1, 8)
    layers = model.model.model.layers
    layers[1].self_attn.attention_dropout = 0.5
    model.train()
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)
    layers[0].self_attn.attention_dropout = 0.5
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)

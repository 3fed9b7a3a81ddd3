"""The composition model as a transformers model: precision, embeddings, modes, settings, training, PEFT, Trainer."""

import copy

import pytest
import torch
from family_models import TOLERANCE
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.modeling.attention import SOFTMAX, AttentionCall
from lolcats.modeling.model import LolcatsForCausalLM


def test_half_precision_leaves_the_linear_parameters_alone(make_linear):
    model = make_linear()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "linear_attention" in name}
    model(torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss.backward()
    for cast in (model.to, lambda dtype: model.half()):
        cast(torch.bfloat16)
        assert model.get_input_embeddings().weight.dtype != torch.float32
        for name, tensor in before.items():
            assert torch.equal(model.state_dict()[name], tensor)
    assert next(model.linear_layers())[1].window_factor.grad.dtype == torch.float32
    assert model.double().state_dict()[next(iter(before))].dtype == torch.float64


@torch.no_grad()
def test_each_pass_has_its_own_mode(make_linear, kit):
    model, input_ids = make_linear(), kit.tokens(1, 12)
    linear = model(input_ids).logits
    softmax = model(input_ids, attention_call=SOFTMAX).logits
    assert torch.equal(model(input_ids).logits, linear)
    assert torch.equal(model(input_ids, attention_call=AttentionCall()).logits, linear)
    assert (softmax - linear).abs().max() > 1e-2
    with pytest.raises(ValueError, match="expected hybrid or softmax"):
        AttentionCall(mode="eager")
    with pytest.raises(ValueError, match="mode='softmax'"):
        AttentionCall(observe=print)


def test_generating_in_softmax_mode(make_linear, llama, kit):
    model, input_ids = make_linear(), kit.tokens(2, 12)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = llama.generate(input_ids, **settings)
    assert torch.equal(model.generate(input_ids, **settings, attention_call=SOFTMAX), expected)
    assert not torch.equal(model.generate(input_ids, **settings), expected)


def test_another_attention_implementation_is_refused(make_linear, kit, tmp_path):
    model, input_ids = make_linear(), kit.tokens(1, 12)
    with pytest.raises(ValueError, match="AttentionCall"):
        model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    for name in ("eager", "sdpa"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


@torch.no_grad()
def test_embeddings_can_be_resized_and_stay_tied_and_settings_are_saved(kit, tmp_path):
    model = kit.linearized(kit.build("llama3.2"), window_size=4, sinks=2, feature_map="t2r", share_state="query_head")
    model.config.provenance = {"seed": 3, "versions": {"torch": "x"}}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = model(kit.tokens(1, 8)).logits
    model.resize_token_embeddings(kit.VOCABULARY + 5, mean_resizing=False)
    assert model.config.vocab_size == model.config.text_config.vocab_size == kit.VOCABULARY + 5
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model(kit.tokens(1, 8)).logits[..., : kit.VOCABULARY], before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    for name in ("attention", "layer_heads", "provenance"):
        assert getattr(loaded.config, name) == getattr(model.config, name)
    assert copy.deepcopy(loaded.config).to_dict() == loaded.config.to_dict()
    assert torch.equal(loaded(kit.tokens(1, 8)).logits, model(kit.tokens(1, 8)).logits)


@torch.no_grad()
def test_labels_and_logits_to_keep_reach_the_base(make_linear, llama, kit):
    model, input_ids = make_linear(window_size=16), kit.tokens(2, 10)
    torch.testing.assert_close(model(input_ids, labels=input_ids).loss, llama(input_ids, labels=input_ids).loss)
    torch.testing.assert_close(
        model(input_ids, labels=input_ids, num_items_in_batch=5).loss,
        llama(input_ids, labels=input_ids, num_items_in_batch=5).loss,
    )
    assert model(input_ids, logits_to_keep=1).logits.shape[1] == 1
    assert model(input_ids, labels=input_ids).past_key_values is None
    assert model(input_ids).past_key_values is not None


def test_parameters_missing_in_a_checkpoint_start_fresh(make_linear, tmp_path):
    from safetensors.torch import load_file, save_file

    model = make_linear(feature_map="t2r")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.model.layers.0.self_attn.linear_attention.q_weight"
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = LolcatsForCausalLM.from_pretrained(tmp_path).state_dict()
    assert torch.equal(loaded[name], torch.eye(8).expand(4, -1, -1))
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items() if key != name)


@pytest.mark.parametrize("family", ["llama3", "gemma3", "gpt-neox", "qwen3-moe"])
@pytest.mark.parametrize(("reentrant", "call"), [(False, None), (True, None), (True, SOFTMAX)])
def test_gradient_checkpointing_gives_the_same_gradients(kit, family, reentrant, call):
    """The layers that run again in the backward pass do what the first pass did."""
    model, input_ids = kit.linearized(kit.build(family), window_size=3), kit.tokens(2, 14)
    trained = [p for name, p in model.named_parameters() if ("linear_attention" in name) == (call is None)]
    model.train()
    loss = model(input_ids, labels=input_ids, attention_call=call).loss
    loss.backward()
    expected = [p.grad.clone() for p in trained]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    again = model(input_ids, labels=input_ids, attention_call=call).loss
    again.backward()
    torch.testing.assert_close(again, loss)
    for parameter, other in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6)  # another order of sums
    assert max(gradient.abs().max() for gradient in expected) > 0


TARGETS = {"llama3": ["q_proj", "o_proj"], "phi3": ["qkv_proj", "o_proj"], "gpt-neox": ["query_key_value", "dense"]}


@pytest.mark.parametrize("family", list(TARGETS))
def test_lora_trains_and_merges(kit, family):
    model, input_ids = kit.linearized(kit.build(family), window_size=3), kit.tokens(2, 14)
    plain = model(input_ids).logits.detach()
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS[family]))
    torch.testing.assert_close(wrapped(input_ids).logits, plain)
    trainable = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(3):
        loss = wrapped(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    wrapped.eval()
    trained = wrapped(input_ids).logits.detach()
    assert (trained - plain).abs().max() > 1e-3
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(input_ids).logits, plain)
    generated = wrapped.generate(input_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    merged = wrapped.merge_and_unload()
    assert isinstance(merged, LolcatsForCausalLM)
    torch.testing.assert_close(merged(input_ids).logits, trained, **TOLERANCE)
    merged_tokens = merged.generate(input_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, merged_tokens)


def test_peft_can_train_the_linear_parameters(make_linear, kit):
    model, input_ids = make_linear(), kit.tokens(2, 14)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["linear_attention"])
    wrapped = get_peft_model(model, config)
    wrapped(input_ids, labels=input_ids).loss.backward()
    gradients = [p.grad for name, p in wrapped.named_parameters() if "linear_attention.modules_to_save" in name]
    assert gradients
    assert all(gradient is not None for gradient in gradients)
    with torch.no_grad():
        linear = wrapped(input_ids).logits
        softmax = wrapped(input_ids, attention_call=SOFTMAX).logits
        assert (linear - softmax).abs().max() > 1e-2
        assert torch.equal(wrapped(input_ids).logits, linear)


def test_trainer_does_a_step(make_linear, kit, tmp_path):
    model = make_linear()
    before = copy.deepcopy(model.state_dict())
    data = [{"input_ids": row, "labels": row, "unused": 1} for row in kit.tokens(4, 10)]
    steps = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(tmp_path / "trainer"), learning_rate=1e-2, **steps, **quiet)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    assert trainer.train().training_loss > 0
    assert trainer.evaluate(eval_dataset=data)["eval_loss"] > 0
    after = model.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before if "linear_attention" in name)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-2")
    assert all(torch.equal(tensor, after[name]) for name, tensor in loaded.state_dict().items())


@torch.no_grad()
def test_a_cap_changes_what_is_beyond_it(make_linear, kit):
    tokens, model = kit.tokens(2, 40), make_linear(window="terraced", window_size=4)
    without = model(tokens).logits
    model.set_attention(linear_length_cap=20)
    changed = model(tokens).logits
    torch.testing.assert_close(changed[:, :20], without[:, :20])
    assert (changed[:, 21:] - without[:, 21:]).abs().max() > 1e-3
    model.set_attention(linear_length_cap=0)
    assert torch.equal(model(tokens).logits, without)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"linear_length_cap": -1}, "expected at least 0"), ({"window_size": 8}, "can be changed without training")],
)
def test_settings_that_do_not_fit_change_nothing(make_linear, settings, message):
    model = make_linear(window="sliding", window_size=4)
    before = model.config.attention
    with pytest.raises(ValueError, match=message):
        model.set_attention(**settings)
    assert model.config.attention == before


def test_conversion_and_loading_give_a_cap(model_dir, tmp_path, caplog):
    base, tokenizer = load_model(model_dir)
    convert(base, AttentionConfig(window_size=4, linear_length_cap=9)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for given, expected in (
        ({}, 9),
        ({"linear_length_cap": 50}, 50),
        ({"linear_length_cap": 0, "cache_bits": None}, 0),
    ):
        model, _ = load_model(tmp_path, **given)
        for _, module in model.linear_layers():
            assert module.config.linear_length_cap == expected
    assert not caplog.text
    load_model(model_dir, cache_bits=None)
    assert f"--cache-bits null changes nothing: {model_dir} is not linearized" in caplog.text
    with pytest.raises(UserError, match="--linear-length-cap -1"):
        load_model(tmp_path, linear_length_cap=-1)

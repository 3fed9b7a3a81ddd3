"""Loading base models and converting them: what is recorded, what is kept, what is refused and why."""

import json
import re
import shutil
from unittest.mock import Mock

import pytest
import torch
from family_models import COMMON
from family_models import build as build_family
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from lolcats.config import DataSection, ModelSection
from lolcats.config.attention import AttentionConfig, LayerHeads
from lolcats.conversion import check_architecture, convert, fit_positions, keep_softmax
from lolcats.errors import UserError
from lolcats.evaluation.load import load_model
from lolcats.modeling.cache import CACHE
from lolcats.modeling.loading import load_base_model, load_skeleton, locate, resolve_device

SMALL = COMMON | {"vocab_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 64, "eos_token_id": 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
STATE_SPACE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, "rotary_dim": 4}


def softmax_layers(model):
    return [layer.index for layer in model.config.layer_heads if layer.is_softmax]


def build(model_type, auto=AutoModelForCausalLM, **settings):
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(model_type, **settings)).eval()


def llama(**settings):
    return build("llama", **(SMALL | settings))


def test_all_layers_are_linearized_with_their_shapes():
    """Of the type and mode of the base model, with the settings."""
    attention = AttentionConfig(window_size=4, feature_dim=3, window_gamma=0.25, sliding_layers="linearize")
    model = convert(llama(head_dim=16).to(torch.bfloat16).train(), attention)
    assert model.training
    assert model.config.dtype == model.dtype == torch.bfloat16
    assert softmax_layers(model) == []
    assert model.config.layer_heads == [
        LayerHeads(
            index=index,
            module=f"model.layers.{index}.self_attn",
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            exact=(),
        )
        for index in range(3)
    ]
    for _, module in model.linear_layers():
        assert module.q_weight.shape == (4, 16, 3)
        assert module.k_weight.shape == (2, 16, 3)
        assert module.q_weight.dtype == torch.float32
        assert module.config == attention == model.config.attention
        assert torch.equal(module.q_weight[0], torch.eye(16, 3))
        assert torch.allclose(module.window_factor.sigmoid(), torch.tensor(0.25))


def test_exact_layers_and_heads():
    model = convert(llama(), AttentionConfig(exact=[2, "0", "1.1"]))
    assert [layer.exact for layer in model.config.layer_heads] == [(0, 1), (1,), (0, 1)]
    assert softmax_layers(model) == [0, 2]
    assert [index for index, _ in model.linear_layers()] == [1]
    assert not hasattr(model.model.model.layers[0].self_attn, "linear_attention")
    for wrong, message in (
        ("7", "exact=7: .*layers 0 to 2"),
        ("2-3", "layers 0 to 2"),
        ("1.2", "KV heads 0 to 1"),
    ):
        with pytest.raises(UserError, match=message):
            convert(llama(), AttentionConfig(exact=[1, wrong]))
    with pytest.raises(UserError, match="no head of LlamaForCausalLM"):
        convert(llama(), AttentionConfig(exact=["0-2"]))
    with pytest.raises(UserError, match="sliding_layers=keep"):
        convert(build("mistral", **SMALL, sliding_window=4), AttentionConfig(sliding_layers="keep"))
    with pytest.raises(UserError, match="feature_dim=9 is larger than head_dim=8"):
        convert(llama(), AttentionConfig(feature_dim=9))


@pytest.mark.parametrize(
    ("types", "policy", "linear"),
    [("sfs", "auto", [1]), ("sfs", "keep", [1])]
    + [(types, policy, [0, 1, 2]) for types, policy in (("sfs", "linearize"), ("sss", "auto"), ("fff", "auto"))],
)
def test_native_sliding_layers(types, policy, linear):
    layers = [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in types]
    base = build("qwen2", **SMALL, use_sliding_window=True, sliding_window=4, layer_types=layers)
    model = convert(base, AttentionConfig(sliding_layers=policy))
    assert [index for index, _ in model.linear_layers()] == linear
    assert softmax_layers(model) == sorted({0, 1, 2} - set(linear))


def test_positions_jump_where_every_layer_knows_the_distances():
    def jumps(base, value="auto"):
        data = DataSection(sequence_length=8, position_offset="auto", position_jumps=value)
        return fit_positions(data, base).position_jumps

    mixed = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 2}
    plain, all_sliding = llama(), build("mistral", **SMALL, sliding_window=4)
    some_sliding = build("qwen2", **SMALL, **mixed | {"layer_types": [*mixed["layer_types"], "sliding_attention"]})
    assert (jumps(plain), jumps(plain, 3)) == (1, 3)
    assert jumps(build("mistral", **SMALL, sliding_window=None)) == 1
    for base in (all_sliding, some_sliding):
        assert (jumps(base), jumps(base, 0)) == (0, 0)
        with pytest.raises(UserError, match=r"position_jumps=1 .* sliding window .*position_jumps=0"):
            jumps(base, 1)


def test_moved_positions_do_not_change_the_factors_of_longrope():
    """One position beyond the border puts the whole micro-batch on other factors."""
    factors = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    sizes = SMALL | {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    base = build("phi3", **sizes, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})
    for length, offset in ((8, 24), (32, 0), (40, 88)):  # longer ones are all on the other factors
        data = fit_positions(DataSection(sequence_length=length, position_offset="auto"), base)
        assert data.position_offset == offset
    with pytest.raises(UserError, match=r"beyond the 32 positions that the model rotates by the same .*at most 24"):
        fit_positions(DataSection(sequence_length=8, position_offset=25), base)


def llama4(no_rope_layers):
    """Layers with rotary embedding (1, whatever the name says) attend within chunks of 6 tokens."""
    layers = {"num_hidden_layers": len(no_rope_layers), "no_rope_layers": no_rope_layers}
    return build_family("llama4", **layers, attention_chunk_size=6)


def test_chunked_layers_keep_softmax():
    for policy in ("keep", "linearize"):
        model = convert(llama4([1, 0, 1]), AttentionConfig(sliding_layers=policy))
        assert softmax_layers(model) == [0, 2]
    model(torch.arange(6)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    with pytest.raises(ValueError, match="rows of up to 6 tokens"):
        model(torch.arange(7)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    fitted = fit_positions(DataSection(sequence_length=6, position_jumps="auto"), llama4([1, 0]))
    assert fitted.position_jumps == 0
    with pytest.raises(UserError, match=r"sequence_length=7 is longer than the chunks of 6 tokens"):
        fit_positions(DataSection(sequence_length=7), llama4([1, 0]))


def test_layers_without_attention_stay_as_they_are():
    base = build_family("granite4")
    before = {name: type(module) for name, module in base.named_modules()}
    model = convert(base, AttentionConfig())
    assert [layer.index for layer in model.config.layer_heads] == [1]
    added = {name for name, module in model.model.named_modules() if before.get(name) is not type(module)}
    assert added == {"model.layers.1.self_attn.linear_attention"}
    assert not model.model.model.layers[0].mamba._forward_pre_hooks
    with pytest.raises(UserError, match=r"exact=0-1: .* has attention in the layers 1"):
        convert(build_family("granite4"), AttentionConfig(exact=["0-1"]))
    with pytest.raises(UserError, match=r"exact=1-0: .* as in 0-1"):
        convert(build_family("granite4"), AttentionConfig(exact=["1-0"]))


def test_layers_that_carry_states_do_not_separate_documents():
    data = DataSection(sequence_length=8, position_offset="auto", position_jumps="auto")
    assert fit_positions(data, build_family("granite4")).position_jumps == 1
    model, input_ids = convert(build_family("granite4"), AttentionConfig()), torch.arange(6)[None] + 3
    with pytest.raises(ValueError, match=r"layers \[0\] of this model carry their state"):
        model(input_ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    model(input_ids, rotary_positions=torch.tensor([[0, 1, 2, 9, 10, 11]]))


REFUSED = {
    "latents-v3": (lambda: build("deepseek_v3", **SMALL | LATENT, v_head_dim=8), r"DeepseekV3ForCausalLM.*latent"),
    "wide-values": (
        lambda: build_family("mimo", head_dim=8, v_head_dim=16),
        r"MiMoV2FlashForCausalLM.*values of 16 dimensions, more than its keys of 8",
    ),
    "chunked": (lambda: llama4([1, 1]), r"no head of Llama4ForCausalLM .* is left to linearize"),
    "no-attention": (
        lambda: build("mamba2", **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, **MAMBA2),
        r"Mamba2ForCausalLM .* no softmax attention",
    ),
    "gpt2": (lambda: build("gpt2", **GPT, pad_token_id=0), r"GPT2LMHeadModel.*rotary position embedding"),
    "falcon": (
        lambda: build("falcon", **SMALL, alibi=False, new_decoder_architecture=False),
        r"FalconForCausalLM.*do not route attention",
    ),
    "some-layers": (
        lambda: build("zamba2", **SMALL, layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=8),
        r"Zamba2ForCausalLM.*layers \[1\] do not route",
    ),
    "two-mixers": (
        lambda: build("falcon_h1", **SMALL, **STATE_SPACE, mamba_d_ssm=64),
        r"FalconH1ForCausalLM.*layer 0 has a mixer of another kind .* beside its attention",
    ),
    "keyword-arguments": (
        lambda: build("stablelm", **SMALL),
        r"StableLmForCausalLM.*layer 0 does not get the keyword arguments.*drops them",
    ),
    "encoder-decoder": (
        lambda: build("bart", AutoModelForSeq2SeqLM, d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=64),
        r"BartForConditionalGeneration.*encoder-decoder",
    ),
    "headless": (lambda: llama().model, r"LlamaModel.*not a causal language model"),
    "twice": (lambda: convert(llama(), AttentionConfig()), r"linearized already"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name_and_reason(case, tmp_path):
    """The model, and its configuration before weights are read."""
    make, message = REFUSED[case]
    base = make()
    keys = set(base.state_dict())
    with pytest.raises(UserError, match=message):
        convert(base, AttentionConfig())
    assert set(base.state_dict()) == keys
    if case not in ("encoder-decoder", "headless", "twice"):
        make().config.save_pretrained(tmp_path)
        with pytest.raises(UserError, match=message):
            check_architecture(ModelSection(path=str(tmp_path)), AttentionConfig(), DataSection())


def test_a_refusal_leaves_the_model_as_it_was_and_a_second_call_is_one():
    """Also one that knows the sizes of all layers; the second call is of the base model or of what wraps it."""
    base, tokens = llama(), torch.arange(6)[None] + 3
    expected, before = base(tokens).logits, (str(base.config), base.config._attn_implementation)
    attention = AttentionConfig(exact=("0.1",), exact_window="1KiB", window_size=4)
    with pytest.raises(UserError, match="give at least"):
        convert(base, attention)
    assert not any(module._forward_pre_hooks or hasattr(module, "attention_config") for module in base.modules())
    assert (str(base.config), base.config._attn_implementation) == before
    assert torch.equal(base(tokens).logits, expected)
    model = convert(base, AttentionConfig(window_size=4))
    hooks = sum(len(module._forward_pre_hooks) for module in base.modules())
    for again in (convert, lambda model, _: keep_softmax(model)):
        for part in (base, model):
            with pytest.raises(UserError, match="linearized already"):
                again(part, AttentionConfig(window_size=4))
    assert hooks == sum(len(module._forward_pre_hooks) for module in base.modules())


def test_what_can_be_linearized_is_not_refused_without_its_weights(tmp_path):
    section, data = ModelSection(path=str(tmp_path)), DataSection(sequence_length=8)
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}  # which looks at positions
    for config in (llama(rope_parameters=dynamic).config, llama().config):
        config.save_pretrained(tmp_path)
        check_architecture(section, AttentionConfig(), data)
    with pytest.raises(UserError, match="exact"):
        check_architecture(section, AttentionConfig(exact=("17",)), data)
    with pytest.raises(UserError, match="sequence_length=9000 is longer than"):
        check_architecture(section, AttentionConfig(), DataSection(sequence_length=9000))


@pytest.mark.parametrize("strict", [False, True])
def test_attention_that_hides_its_cache_is_refused(monkeypatch, strict):
    """The state travels as a keyword argument; a module that drops or refuses it would have no state."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    route = LlamaAttention.forward

    def without_kwargs(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        cache = kwargs.pop(CACHE, None)
        if strict and kwargs.keys() - {"position_ids", "use_cache", "return_dict", "output_attentions"}:
            raise TypeError(f"unexpected keyword arguments {sorted(kwargs)}")
        return route(self, hidden_states, position_embeddings, attention_mask, cache)

    monkeypatch.setattr(LlamaAttention, "forward", without_kwargs)
    with pytest.raises(UserError, match="state cannot be reached"):
        convert(llama(), AttentionConfig())


def test_probing_hides_no_programming_error(monkeypatch):
    """A model that fails is refused with the cause; a mistake in code is not taken for such a model."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    monkeypatch.setattr(LlamaAttention, "forward", Mock(side_effect=ValueError("no such shape")))
    with pytest.raises(UserError, match=r"failed \(ValueError: no such shape\)"):
        convert(llama(), AttentionConfig())
    monkeypatch.setattr(LlamaAttention, "forward", Mock(side_effect=NameError("a misspelt name")))
    with pytest.raises(NameError, match="a misspelt name"):
        convert(llama(), AttentionConfig())


# --- loading ------------------------------------------------------------------------------------------------


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("token", "special", "template", "named"),
    [
        ("<|turn|>", True, "{{ messages }}<|turn|>", "<|turn|>"),
        ("newword", False, None, "newword"),
        ("<image>", True, None, None),  # which no text has: Gemma 3's
    ],
)
def test_tokens_beyond_the_embedding_are_named(model_dir, tmp_path, token, special, template, named):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([token], special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    section = ModelSection(path=str(folder), device="cpu")
    if named is None:
        load_base_model(section)
        return
    with pytest.raises(UserError, match=rf"beyond the 62 rows .*\({re.escape(named)}\).*resize_token_embeddings"):
        load_base_model(section)


def test_loading_fails_clearly(model_dir, tmp_path, tmp_path_factory, monkeypatch):
    folder = shutil.copytree(model_dir, tmp_path / "model")

    def message(**section):
        with pytest.raises(UserError) as caught:
            load_base_model(ModelSection(**({"path": str(folder), "device": "cpu"} | section)))
        return str(caught.value)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hub id or a local folder" in message(path=None)
    assert "folder not found" in message(path="./nowhere")
    assert "folder not found" in message(path="/no/such/folder")
    assert "is a file" in message(path=str(folder / "config.json"))
    assert "'nobody/nothing' not found" in message(path="nobody/nothing")
    assert "expected auto, cpu" in message(device="toaster")
    if not torch.cuda.is_available():
        assert "0 CUDA devices" in message(device="cuda")
    assert "model.device='xpu'" in message(device="xpu")  # not in this build
    other = tmp_path_factory.mktemp("gguf")
    assert "no config.json" in message(path=str(other))
    (other / "it.gguf").touch()
    assert "one of a GGUF file" in message(path=str(other))
    before = (folder / "config.json").read_text()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "Only safetensors" in message()  # pickles can run code
    edit_config(folder, model_type="brand_new_model")
    assert "does not know the architecture" in message()
    edit_config(folder, auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    assert "brings its own model code" in message()
    (folder / "config.json").write_text(before[:40])
    assert "cannot read" in message()
    (folder / "config.json").write_text(before)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised (gptq)" in message()
    edit_config(folder, quantization_config=None)
    for other, words in (("t5", "encoder-decoder"), ("vit", "not a decoder")):
        AutoConfig.for_model(other).save_pretrained(folder)
        assert words in message()
    (folder / "tokenizer.json").unlink()
    convert(llama(), AttentionConfig()).save_pretrained(folder)
    assert "already linearized" in message()
    llama().save_pretrained(folder)
    assert "no tokenizer" in message()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert "knows no words" in message()
    with monkeypatch.context() as patch:
        gated = OSError("You are trying to access a gated repo.")
        patch.setattr(AutoConfig, "from_pretrained", Mock(side_effect=gated))
        assert "accepted its licence: do so at https://huggingface.co/some/model" in message(path="some/model")


@pytest.mark.parametrize("alone", [False, True])
def test_a_folder_with_an_adapter_is_refused_until_it_is_merged(model_dir, tmp_path, alone):
    folder = tmp_path / "model"
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), LoraConfig(target_modules=["q_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    if not alone:
        shutil.copytree(model_dir, folder)
    adapted.save_pretrained(folder)
    section = ModelSection(path=str(folder), device="cpu")
    for load in (load_base_model, load_skeleton, locate, lambda _: load_model(folder)):
        with pytest.raises(UserError, match=r"has an adapter \(adapter_config.json\)[^\0]*merge_and_unload"):
            load(section)
    (tmp_path / "ADAPTER").mkdir()
    for file in folder.glob("adapter_*"):
        file.rename(tmp_path / "ADAPTER" / file.name)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), str(tmp_path / "ADAPTER"))
    merged = shutil.copytree(model_dir, tmp_path / "MERGED")
    model.merge_and_unload().save_pretrained(merged)
    found, _ = load_base_model(ModelSection(path=str(merged), device="cpu"))
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(found(tokens).logits, adapted.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["missing", "shape", "linearized", "cut"])
def test_incomplete_checkpoints_are_refused(model_dir, tmp_path, change):
    folder, name = shutil.copytree(model_dir, tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    if change == "linearized":
        convert(AutoModelForCausalLM.from_pretrained(model_dir), AttentionConfig()).save_pretrained(folder)
        name = "model.model.layers.1.self_attn.linear_attention.q_weight"
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    save_file(
        tensors | ({name: tensor[1:]} if change == "shape" else {}), folder / "model.safetensors", {"format": "pt"}
    )
    if change == "cut":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    complaint = {"linearized": re.escape(name), "cut": "cannot load .*header"}.get(change, "up_proj.weight")
    with pytest.raises(UserError, match=complaint):
        load_model(folder, device="cpu")


def test_a_converted_model_has_no_name(model_dir):
    """Trainers that load a reference by it would take the softmax model."""
    assert convert(AutoModelForCausalLM.from_pretrained(model_dir), AttentionConfig()).config.name_or_path == ""


def test_tensors_of_no_part_of_the_model_are_named(model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    with pytest.warns(UserWarning, match=r"left out 9 tensors of no part of the model: model\.layers\.1"):
        load_base_model(ModelSection(path=str(folder), device="cpu"))


def test_tied_and_ignored_tensors_may_be_absent(model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    llama(vocab_size=62, tie_word_embeddings=True).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    load_base_model(ModelSection(path=str(folder), device="cpu"))


def test_a_gpu_that_this_build_of_pytorch_cannot_use_is_no_silent_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resolve_device("auto", gpus=str(tmp_path / "nvidia[0-9]*")).type == "cpu"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(UserError, match="nvidia-smi names the newest CUDA version"):
        resolve_device("auto", gpus=str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto", gpus=str(tmp_path / "nvidia[0-9]*")).type == "cpu"

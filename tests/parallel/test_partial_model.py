"""Parts of a model, read from its checkpoint, compute and are written as the whole model's."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from family_models import build as build_family
from family_models import families, tokens
from safetensors.torch import load_file, save_file
from torch import distributed

from lolcats.checkpoint.write import export
from lolcats.config import ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.errors import UserError
from lolcats.modeling import loading
from lolcats.modeling.attention import SOFTMAX
from lolcats.modeling.decoder import decoder_layers, embedding_name, run_layers
from lolcats.modeling.loading import load_base_model, load_skeleton
from lolcats.parallel import sharding
from lolcats.parallel.blockwise.layers import divide
from lolcats.parallel.blockwise.partial_model import PartialModel
from lolcats.parallel.group import Group
from lolcats.parallel.sharding import load_sharded


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A family's whole linearized model, and the same in parts."""
    monkeypatch.setattr(loading, "load_tokenizer", lambda *arguments: None)

    def build(family, *, sliding="linearize", **changes):
        folder = tmp_path / "model"
        build_family(family, **changes).save_pretrained(folder, max_shard_size="20KB")
        section = ModelSection(path=str(folder), device="cpu")
        attention = AttentionConfig(window_size=3, sliding_layers=sliding)
        whole = convert(load_base_model(section)[0], attention)
        partial = PartialModel(convert(load_skeleton(section), attention), folder, torch.device("cpu"))
        return SimpleNamespace(whole=whole, partial=partial, folder=folder)

    return build


def softmax_outputs(whole, inputs):
    """The hidden states after every decoder layer."""
    seen = []
    hooks = [layer.register_forward_hook(lambda _, __, y: seen.append(y)) for layer in whole.get_decoder().layers]
    with torch.no_grad():
        whole.get_decoder()(**inputs, use_cache=False, attention_call=SOFTMAX)
    for hook in hooks:
        hook.remove()
    return seen


@contextmanager
def loaded(partial, block):
    """The layers of a block, whose weights alone (and the embedding's, for the first) are in memory."""
    parts = [f"{decoder_layers(partial.model)[0]}.{index}" for index in range(block.begin, block.end)]
    with partial.loaded(*parts, *([embedding_name(partial.model)] if block.index == 0 else [])):
        yield range(block.begin, block.end)


def run_blocks(partial, inputs, size):
    """(block, its output) for each block, in order."""
    outputs = []
    linear = [index for index, _ in partial.model.linear_layers()]
    with torch.no_grad():
        for block in divide(linear, size):
            with loaded(partial, block) as part:
                outputs.append((block, run_layers(partial.model, part, inputs, SOFTMAX)))
            positions = {name: tensor for name, tensor in inputs.items() if name == "position_ids"}
            inputs = positions | {"hidden_states": outputs[-1][1]}
    return outputs


@pytest.mark.parametrize("family", families("gemma4-shared-keys"))
def test_in_parts_a_model_computes_and_is_written_as_the_whole_one(family, pair, tmp_path):
    made = pair(family)
    assert_computed_alike(made, {"input_ids": tokens(2, 12)})
    assert_written_alike(made, tmp_path)


def test_layers_that_need_more_than_the_one_before_are_refused(pair):
    for changes, message in (({}, "keys of earlier ones"), ({"num_kv_shared_layers": 0}, "its own embedding")):
        with pytest.raises(UserError, match=rf"Gemma4ForCausalLM.*{message}.*block_mode=joint"):
            pair("gemma4-shared-keys", **changes)


def assert_computed_alike(made, inputs):
    """The outputs of all blocks, each run by itself, are those of the whole model."""
    whole = softmax_outputs(made.whole, inputs)
    for block, output in run_blocks(made.partial, inputs, 1):
        assert torch.equal(output, whole[block.end - 1]), block


def assert_written_alike(made, folder):
    """The folder written in parts is that of save_pretrained."""
    made.whole.save_pretrained(folder / "whole")
    tokenizer = SimpleNamespace(eos_token_id=0, save_pretrained=lambda folder: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lolcats.checkpoint.write.SHARD_BYTES", 20_000)
        export(made.partial.model, tokenizer, folder / "parts", weights=made.partial.weights(), report={}, card="")
    expected = load_file(folder / "whole" / "model.safetensors")
    shards = sorted((folder / "parts").glob("*.safetensors"))
    found = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(shards) > 1
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    configs = [json.loads((folder / part / "config.json").read_text()) for part in ("whole", "parts")]
    assert configs[0] == configs[1]


def in_memory(partial):
    """Names of the base model's parameters that hold weights now, feature maps and window factors omitted."""
    named = partial.model.model.named_parameters()
    return {name for name, parameter in named if not parameter.is_meta and "linear_attention" not in name}


def test_only_one_block_is_in_memory(pair):
    made = pair("llama3", num_hidden_layers=4)
    blocks = divide([0, 1, 2, 3], 2)
    assert in_memory(made.partial) == set()
    for block in blocks:
        with loaded(made.partial, block):
            names = in_memory(made.partial)
            layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
            assert layers == set(range(block.begin, block.end))
            outside = {name for name in names if ".layers." not in name}
            assert outside == ({"model.embed_tokens.weight"} if block.index == 0 else set())
        assert in_memory(made.partial) == set()


@pytest.mark.parametrize(
    ("layer_types", "expected"),
    [("sliding full sliding full", [(0, 2), (2, 4)]), ("full sliding sliding full sliding", [(0, 1), (1, 4)])],
)
def test_softmax_layers_inside_and_at_the_borders(layer_types, expected, pair):
    types = [f"{name}_attention" for name in layer_types.split()]
    made = pair("gemma2", sliding="keep", num_hidden_layers=len(types), layer_types=types)
    assert_computed_alike(made, {"input_ids": tokens(2, 12)})
    blocks = divide([index for index, _ in made.partial.model.linear_layers()], 1)
    assert [(block.begin, block.end) for block in blocks] == expected


def test_tied_by_configuration_but_not_by_weights(tmp_path):
    """A checkpoint that holds both, differing, keeps both; equal ones are one."""
    folder = tmp_path / "model"
    build_family("llama3.2").save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    section = ModelSection(path=str(folder), device="cpu")
    for head, tied in [(embedding.clone(), {"lm_head.weight"}), (embedding + 1, set())]:
        save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
        model = convert(load_skeleton(section), AttentionConfig())
        assert PartialModel(model, folder, torch.device("cpu")).checkpoint.tied == tied


def test_sharded_loading_reads_buffers(tmp_path, monkeypatch):
    """Gemma 4 scales each layer's output by a number that is saved, but is no parameter."""
    monkeypatch.setattr(sharding, "load_tokenizer", lambda *arguments: None)
    model = build_family("gemma4")
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.5)
    model.save_pretrained(tmp_path)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        section = ModelSection(path=str(tmp_path), device="cpu")
        sharded, _ = load_sharded(section, AttentionConfig(), Group(device=torch.device("cpu")))
        inputs = {"input_ids": tokens(1, 12)}
        with torch.no_grad():
            found = sharded(**inputs, attention_call=SOFTMAX).logits
            torch.testing.assert_close(found, model(**inputs).logits, rtol=1e-4, atol=1e-4)
    finally:
        distributed.destroy_process_group()

"""Exported folders load on machines without this package, by the code that they carry."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from transformers import AutoModelForCausalLM

from lolcats.modeling import bundle

WITHOUT_LOLCATS = """
import importlib.util, sys
assert importlib.util.find_spec("lolcats") is None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
folder = sys.argv[1]
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    raise SystemExit("remote code ran without being asked for")
except ValueError:
    pass
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
inputs = torch.load(folder + "/inputs.pt", weights_only=True)
with torch.no_grad():
    logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
model.save_pretrained(folder + "/again")
again = AutoModelForCausalLM.from_pretrained(folder + "/again", trust_remote_code=True)
assert torch.equal(again(inputs["input_ids"]).logits, model(inputs["input_ids"]).logits)
hidden = AutoModel.from_pretrained(folder, trust_remote_code=True)(inputs["input_ids"]).last_hidden_state
assert torch.equal(hidden, model.base_model(inputs["input_ids"]).last_hidden_state)
classifier = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=3)
assert classifier(**inputs).logits.shape == (2, 3)
assert "lolcats" not in sys.modules
torch.save({"logits": logits, "tokens": tokens}, folder + "/outputs.pt")
"""


@pytest.fixture
def folder(make_linear, tmp_path):
    model = make_linear(exact=["0.1", 1], sinks=1, exact_window=5, exact_bits=8)
    model.save_pretrained(tmp_path)  # writes the bundle
    return tmp_path


OTHER_PYTHON = os.environ.get("LOLCATS_OTHER_PYTHON")  # with another release of transformers


@torch.no_grad()
@pytest.mark.parametrize("python", [sys.executable, OTHER_PYTHON], ids=["same", "other"])
def test_the_folder_loads_without_this_package(folder, kit, tmp_path, python):
    if python is None:
        pytest.skip("LOLCATS_OTHER_PYTHON is not set")
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = {"input_ids": kit.tokens(2, 11), "attention_mask": kit.padding([11, 6], 11)}
    torch.save(inputs, folder / "inputs.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    # -S -E would hide site-packages too; an installed lolcats is hidden by blocking its import
    block = (
        "import sys, importlib.machinery as m\n"
        "class Finder(m.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] == 'lolcats' else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Finder if f is m.PathFinder else f for f in sys.meta_path"
        " if 'editable' not in getattr(f, '__name__', type(f).__name__).lower()]\n"
    )
    command = [python, "-c", block + WITHOUT_LOLCATS, str(folder)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    outputs = torch.load(folder / "outputs.pt", weights_only=True)
    torch.testing.assert_close(outputs["logits"], model(**inputs).logits, rtol=1e-5, atol=1e-5)  # libraries may differ
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(outputs["tokens"], expected)


def test_installed_code_wins_over_the_bundle(folder):
    for trust in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(model).__module__ == "lolcats.modeling.model"


def test_the_folder_has_two_source_files(folder):
    files = {file.name: file.read_text() for file in folder.glob("*.py")}
    assert files.keys() == {"configuration_lolcats.py", "modeling_lolcats.py"}
    for name, source in files.items():
        assert not re.search(r"^\s*(from|import) (lolcats|triton|pydantic|peft)", source, re.MULTILINE), name
        assert source.count("`pip install lolcats` brings the GPU kernels") == 1
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == bundle.AUTO_MAP
    assert config["model_type"] == "lolcats"


@pytest.mark.parametrize("release", ["4.57.6", "5.16.1", "5.25.0"])
def test_another_release_of_transformers_is_named_on_import(folder, release, monkeypatch, caplog):
    """Instead of an error in a layer, or of whatever that release lacks."""
    monkeypatch.setattr("transformers.__version__", release)
    if release.startswith("4"):
        monkeypatch.delattr("transformers.PreTrainedConfig")
    spec = spec_from_file_location("configuration_lolcats", folder / "configuration_lolcats.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their annotations up
    is_old = release < "5.17"
    with pytest.raises(ImportError) if is_old else nullcontext() as error:
        spec.loader.exec_module(module)
    message = str(error.value) if is_old else caplog.text
    assert f"tested with transformers>=5.17,<5.25, but {release} is installed" in message


def test_modules_are_joined():
    kernels = "from lolcats.ops.hybrid_attention.kernels.some import supports"
    sources = {
        "lolcats.a": '"""Doc."""\n\nimport math\n\n\n_part = math.pi\n\n\ndef one():\n    return _part\n',
        "lolcats.b": "from lolcats.a import one as uno\n\n_part = 2\n\n\ndef two():\n    return uno() + _part\n",
        "lolcats.c": f"{kernels}\n\n\ndef three():\n    return supports(1) is None\n",
    }
    names = {}
    exec(bundle.join(sources, "Joined."), names)
    assert names["one"]() == math.pi
    assert names["two"]() == math.pi + 2
    assert names["three"]() is False


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from lolcats.ops import nothing\n", "nothing is imported and defined nowhere"),
        ("def one():\n    pass\n", "both define one"),
        ("from torch import one\n", "defines one, which another module imports from elsewhere"),
    ],
)
def test_modules_that_cannot_be_joined(source, message):
    with pytest.raises(ValueError, match=message):
        bundle.join({"lolcats.a": "def one():\n    return 1\n", "lolcats.b": source}, "Joined.")

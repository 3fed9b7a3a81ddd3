"""Exported folders load on machines without this package, by the code that they carry."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import lolcats.modeling.model

WITHOUT_LOLCATS = """
import importlib.util, sys
assert importlib.util.find_spec("lolcats") is None
import torch
from transformers import AutoModel, AutoModelForCausalLM
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
assert "lolcats" not in sys.modules
torch.save({"logits": logits, "tokens": tokens}, folder + "/outputs.pt")
"""


@pytest.fixture
def folder(make_linear, tmp_path):
    model = make_linear(exact=["0.1", 1], sinks=1, exact_window=5, cache_bits=8)
    model.save_pretrained(tmp_path)  # writes the code
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


def test_installed_code_wins_over_the_copy(folder, tmp_path):
    for trust in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(model).__module__ == "lolcats.modeling.model"
    not_imported = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "assert 'lolcats' not in sys.modules\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert type(model).__module__ == 'lolcats.modeling.model', type(model)\n"
        "model.config.save_pretrained(sys.argv[1] + '/config')\n"
        "import os; assert os.listdir(sys.argv[1] + '/config') == ['config.json']\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    subprocess.run([sys.executable, "-c", not_imported, str(folder)], env=environment, check=True)


def test_the_code_is_the_packages_but_for_its_imports(folder):
    files = {file.name: file.read_text() for file in folder.glob("*.py")}
    config = json.loads((folder / "config.json").read_text())
    assert {name.partition(".")[0] for name in config["auto_map"].values()} == {"modeling_lolcats"}
    assert files.pop("modeling_lolcats.py").count("from lolcats.modeling import") == 1
    for name, source in files.items():
        assert not re.search(r"^\s*(from|import) (lolcats|triton|pydantic|peft)", source, re.MULTILINE), name
    changed = files["lolcats_modeling_model.py"].replace("from .lolcats_modeling_", "from lolcats.modeling.")
    changed = changed.replace("from .lolcats_config_", "from lolcats.config.").partition("\n")[2]
    assert changed == Path(lolcats.modeling.model.__file__).read_text()


@pytest.mark.parametrize("release", ["4.57.6", "5.16.1", "5.25.0"])
def test_another_release_of_transformers_is_named_on_import(folder, release, monkeypatch, caplog):
    """Instead of an error in a layer, or of whatever that release lacks."""
    monkeypatch.setattr("transformers.__version__", release)
    if release.startswith("4"):
        monkeypatch.delattr("transformers.PreTrainedConfig")
    monkeypatch.syspath_prepend(folder.parent)
    is_old = release < "5.17"
    with pytest.raises(ImportError) if is_old else nullcontext() as error:
        import_module(f"{folder.name}.lolcats_modeling_configuration")
    message = str(error.value) if is_old else caplog.text
    assert f"tested with transformers>=5.17,<5.25, but {release} is installed" in message

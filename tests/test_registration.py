"""`import lolcats` registers the model type, in whatever order things are imported."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "imports",
    [
        "import lolcats\nimport transformers",
        "import lolcats, importlib.util\nimportlib.util.find_spec('transformers')",
        "import lolcats, sys, transformers\ndel sys.modules['transformers']\nimport transformers",
        "import lolcats.modeling.configuration",  # itself the first to import transformers
    ],
)
def test_the_model_type_is_known(imports):
    check = "\nfrom transformers import AutoConfig\nprint(type(AutoConfig.for_model('lolcats')).__name__)"
    done = subprocess.run([sys.executable, "-c", imports + check], capture_output=True, text=True)
    assert done.stdout.strip() == "LolcatsConfig", done.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("lolcats", "pydantic datasets peft typer"),
        ("lolcats.cli.app", "torch transformers datasets"),  # of `--help`
        ("lolcats.vllm_plugin", "torch transformers vllm"),  # which vLLM imports in each of its processes
    ],
)
def test_importing_brings_nothing_heavy(module, heavy):
    code = f"import sys, {module}; print([m for m in '{heavy}'.split() if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_names_of_the_package():
    import lolcats

    assert all(getattr(lolcats, name) is not None for name in lolcats.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lolcats.nothing  # noqa: B018

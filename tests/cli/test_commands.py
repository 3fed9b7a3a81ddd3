"""Start, recipes, warnings and report."""

import warnings

from lolcats.recipes import list_recipes


def test_recipes_are_listed_and_shown(cli):
    listing = cli("recipes").stdout
    assert all(name in listing for name in list_recipes())
    shown = cli("recipes", "show", "demo").stdout
    assert shown.startswith(
        f"# demo over smollm2-135m over smollm2-135m-paper over lolcats\n# {list_recipes()['demo']}"
    )
    result = cli("recipes", "show", "nothing")
    assert result.exit_code == 1
    assert "no recipe named 'nothing'" in result.stderr


def test_warnings_of_lolcats_are_shown_once_and_those_of_libraries_are_not(cli, replace_module):
    """A missing fused kernel, or decoding without CUDA graphs, must be seen."""

    def load_model(path, **_):
        for _ in range(2):
            warnings.warn("decoding without CUDA graphs, slower", stacklevel=1)
            warnings.warn_explicit("advice", UserWarning, "x.py", 1, module="transformers.models")
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        return None, None

    replace_module("lolcats.evaluation.load", load_model=load_model)
    shown = cli("eval", "out/", "--tasks", "perplexity", "--data", "demo").stderr
    assert shown.count("warning: decoding without CUDA graphs, slower") == 1
    assert "advice" not in shown
    assert "old" not in shown

"""Runs examples/lolcats.ipynb on a tiny model: `make notebook`. The executed copy is build/lolcats.ipynb."""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tiny_base import write_demo_base

ROOT = Path(__file__).parents[1]
SHORT = """
MODEL, LENGTHS = "base", [32, 64]
SETTINGS["data"]["sources"] = [{"path": "demo"}]  # a random model writes nothing of use
for stage in ("transfer", "gates", "adjust"):
    SETTINGS[stage]["max_steps"] = 1
"""

notebook = nbformat.read(ROOT / "examples" / "lolcats.ipynb", as_version=4)
code = [cell for cell in notebook.cells if cell.cell_type == "code"]
assert not any(cell.outputs for cell in code), "the notebook is kept without outputs"
(parameters,) = (cell for cell in code if "parameters" in cell.metadata.get("tags", ()))
parameters.source += SHORT
with tempfile.TemporaryDirectory() as folder:
    write_demo_base(Path(folder) / "base")
    NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
for cell in code[1:]:
    assert cell.outputs, cell.source
(ROOT / "build").mkdir(exist_ok=True)
nbformat.write(notebook, ROOT / "build" / "lolcats.ipynb")
print("the notebook runs: build/lolcats.ipynb")

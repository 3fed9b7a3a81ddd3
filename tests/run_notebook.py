"""Runs examples/lolcats.ipynb on a tiny model: `make notebook`. The executed copy is build/lolcats.ipynb."""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tiny_base import write_demo_base

ROOT = Path(__file__).parents[1]
SHORT = {
    "attention": {"feature_dim": 8, "window_size": 8},
    "data": {"sequence_length": 64, "validation_sequences": 2},
    "transfer": {"max_steps": 1},
    "adjust": {"max_steps": 1},
}
PARAMETERS = f"MODEL, WHERE, SETTINGS, LENGTHS = 'base', {{}}, {SHORT}, [32, 64]"

notebook = nbformat.read(ROOT / "examples" / "lolcats.ipynb", as_version=4)
code = [cell for cell in notebook.cells if cell.cell_type == "code"]
assert not any(cell.outputs for cell in code), "the notebook is kept without outputs"
(parameters,) = (cell for cell in code if "parameters" in cell.metadata.get("tags", ()))
parameters.source += f"\n\n{PARAMETERS}  # of this test"
with tempfile.TemporaryDirectory() as folder:
    write_demo_base(Path(folder) / "base")
    NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
for cell in code[1:]:
    assert cell.outputs, cell.source
(ROOT / "build").mkdir(exist_ok=True)
nbformat.write(notebook, ROOT / "build" / "lolcats.ipynb")
print("the notebook runs: build/lolcats.ipynb")

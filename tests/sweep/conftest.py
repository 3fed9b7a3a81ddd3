"""A sweep file for a tiny model."""

from __future__ import annotations

import pytest
import yaml


@pytest.fixture
def sweep_file(model_dir, data_file, tmp_path, monkeypatch):
    """Two ranks, a few steps each."""
    monkeypatch.setenv("LOLCATS_CACHE", str(tmp_path / "cache"))
    stage = {"batch_size": 2, "micro_batch_size": 2, "max_steps": 2, "eval_every": 2, "checkpoint_every": 2}
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(model_dir), "device": "cpu"},
                "attention": {"window_size": 4},
                "data": {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_rows": 10},
                "transfer": stage,
                "adjust": stage,
            }
        )
    )
    file = tmp_path / "sweep.yaml"
    values = {
        "recipe": str(recipe),
        "axes": {"adjust.lora_rank": [2, 4]},
        "held_out": {"own": {"path": str(data_file), "max_rows": 10}},
        "seeds": [0],
    }
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file

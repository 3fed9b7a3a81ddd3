"""The whole pipeline on a tiny model: what it writes, how it goes on after a kill, what it refuses."""

import importlib.util
import io
import json
import re
import shutil
from functools import reduce
from pathlib import Path

import pytest
import torch
from family_models import build_multimodal
from huggingface_hub import ModelCard
from rich.console import Console
from safetensors.torch import load_file, save_file
from toy_stage import Killed, failing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lolcats import pipeline
from lolcats.config import DataSection, LinearizeConfig, ModelSection, merge
from lolcats.conversion import covered_positions, fit_positions
from lolcats.data import build_datasets
from lolcats.errors import UserError
from lolcats.evaluation.perplexity import dataset_perplexity
from lolcats.modeling.loading import load_base_model
from lolcats.pipeline import linearize
from lolcats.recipes import load_recipe
from lolcats.report import model_card, without_paths
from lolcats.training import loop
from lolcats.training.run_folder import FolderLock


@pytest.fixture(scope="session")
def measure(run_settings):
    """measure(model) -> its perplexity on the validation data."""

    def call(model):
        data = LinearizeConfig.from_dict(run_settings).data
        tokenizer = AutoTokenizer.from_pretrained(run_settings["model"]["path"])
        return dataset_perplexity(model, build_datasets(data, tokenizer, seed=0, progress=False)[1])["perplexity"]

    return call


SHORT = {"transfer": {"max_steps": 1}, "adjust": {"enabled": False}}


def test_the_folder_holds_everything(finished):
    output, report = finished
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "lolcats_report.json", "run"} <= names
    assert not any(path.suffix in (".bin", ".pt", ".pth", ".pkl") for path in output.rglob("*"))
    assert not (output / ".export-unfinished").exists()
    saved = json.loads((output / "lolcats_report.json").read_text())
    assert saved == json.loads(json.dumps(report))
    assert set(saved["perplexity"]) == {"teacher", "swapped", "transfer", "adjust"}
    for stage in ("transfer", "adjust"):
        assert saved["stages"][stage]["tokens"] == 6 * 2 * 48
        assert {"seconds", "tokens_per_second", "peak_memory_gib"} <= set(saved["stages"][stage])
    assert len(saved["stages"]["transfer"]["layer_losses"]) == 2
    assert torch.__version__.startswith(saved["provenance"]["versions"]["torch"])  # without "+cu130"
    assert saved["config"]["seed"] == 0
    card = (output / "README.md").read_text()
    assert f"{report['perplexity']['adjust']:.3f}" in card
    assert "A linear-time, constant-memory version" in card
    assert "trust_remote_code=True in both calls" in card


def test_the_card_names_what_ran_and_no_local_paths(finished, model_dir):
    _, report = finished

    def card(*stages, base=str(model_dir), **changes):
        config = merge(report["config"], changes)
        config["transfer"]["data"] = config["data"] | {"sources": [{"path": "owner/first"}]}
        ran = {"config": config, "stages": dict.fromkeys(stages, report["stages"]["adjust"]), "perplexity": {}}
        made = ModelCard(model_card(report | ran | {"base_model": base}))
        assert str(model_dir.parent) not in made.content
        return made.data, " ".join(made.text.split())

    data, text = card("transfer", "gates", "adjust")
    assert (data.base_model, data.tags) == (model_dir.name, ["lolcats", "linear-attention"])
    assert "by attention transfer, head gates, low-rank adjusting" in text
    assert "transfer on owner/first; head gates on demo; low-rank adjusting on records.jsonl; validation on" in text
    assert all(words in text for words in ("sinks: 0;", "exact heads in the model's type:", "docs/limits.md."))
    data, text = card("adjust", base="/home/me: mine/# it: 'x'", attention={"exact_window": "16MiB", "cache_bits": 8})
    assert ("exact heads in 8 bits:" in text, data.base_model) == (True, "# it: 'x'")
    assert not any(words in text for words in ("attention transfer", "owner/first", "grows with"))
    assert "without training" in card()[1]
    data, text = card("transfer", "adjust", adjust={"softmax_control": True}, base="owner/name")
    assert (data.base_model, data.tags) == ("owner/name", ["lolcats", "softmax-control"])
    assert not any(words in text for words in ("owner/first", "Limits"))


def test_no_file_names_a_folder_of_this_machine(finished):
    place, output = str(finished[0].parents[1]).encode(), finished[0]
    files = [file for file in output.rglob("*") if file.is_file() and "run" not in file.relative_to(output).parts]
    assert not [file.name for file in files if place in file.read_bytes()]
    paths = ["/home/me/base", "~/x", "../y/z", "runs/a/*.jsonl", "owner/name", "1/2 of 3/4"]
    assert without_paths({"a": paths}) == {"a": ["base", "x", "z", "*.jsonl", "owner/name", "1/2 of 3/4"]}


def test_the_reloaded_model_has_the_reported_perplexity(finished, measure):
    output, report = finished
    measured = measure(AutoModelForCausalLM.from_pretrained(output))
    assert measured == pytest.approx(report["perplexity"]["adjust"], rel=1e-4)  # merging rounds
    assert measured != pytest.approx(report["perplexity"]["swapped"], rel=1e-3)
    config_text = json.loads((output / "config.json").read_text())
    assert config_text["provenance"]["config"]["attention"]["window_size"] == 4


def test_the_softmax_control_is_a_model_of_the_base_type(run, measure, tmp_path):
    report = run(tmp_path / "out", {"adjust": {"softmax_control": True}})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (type(model).__name__, model.config.model_type) == ("LlamaForCausalLM", "llama")
    assert not list((tmp_path / "out").glob("*.py"))
    measured = measure(model)
    assert measured == pytest.approx(report["perplexity"]["adjust"], rel=1e-4)  # merging rounds
    assert measured != pytest.approx(report["perplexity"]["teacher"], rel=1e-3)


OTHERS = {
    "transfer-only": {"adjust": {"enabled": False}},
    "no-transfer": {"transfer": {"enabled": False}, "adjust": {"train_feature_maps": True}},
    "window-only": {"attention": {"feature_map": None}, "transfer": {"enabled": False}},
    "mixed-t2r": {"attention": {"exact": [1], "share_state": "query_head", "feature_map": "t2r", "sinks": 2}},
    "documents-xent": {"data": {"loss_on": "all"}, "transfer": {"xent_factor": 1.0, "block_layers": 1}},
    "jumps": {"data": {"position_offset": "auto", "position_jumps": 1}},
    "options": {
        "attention": {"feature_dim": 3},
        "transfer": {"schedule": "cosine"},
        "adjust": {"train_feature_maps": True, "feature_lr": 1e-3, "distill_factor": 0.5},
    },
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_other_recipes_run_and_reload(run, tmp_path, changes):
    report = run(tmp_path / "out", {"transfer": {"max_steps": 2}, "adjust": {"max_steps": 2}}, changes)
    assert all(value > 1 for value in report["perplexity"].values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(12)[None] + 2
    generated = model.generate(tokens, max_new_tokens=5, do_sample=False)
    uncached = model.generate(tokens, max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(generated, uncached)


def snapshot(folder):
    """Every file below a folder with its content; None: there is no folder."""
    if not folder.exists():
        return None
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adjust": {"lora_rank": 1000}}, "lora_rank=1000 is more than"),
        ({"adjust": {"batch_size": 512}}, "fewer than one batch of 512"),
        ({"transfer": {"batch_size": 512}}, "fewer than one batch of 512"),
        ({"data": {"sequence_length": 256}}, r"sequence_length=256 .* 128 positions"),
        ({"data": {"position_offset": 81}}, r"position_offset=81 .* 128 positions .* at most 80"),
        ({"data": {"sources": [{"path": "absent.jsonl"}]}}, "absent.jsonl"),
        ({"model": {"path": "/absent/model"}}, "absent/model"),
        ({"attention": {"window_size": 999}}, r"window of up to 1998 keys.*: set a smaller .*--window-size"),
        ({"attention": {"window_size": 32}}, r"window of up to 64 keys.*: set data.sequence_length above 64, or"),
        ({"data": {"sources": [{"path": "self", "max_rows": 2}], "validation_rows": 2}}, "max_rows leaves none"),
        (
            {"transfer": {"block_mode": "streaming", "block_layers": 1}, "adjust": {"lora_rank": 1000}},
            "lora_rank=1000",
        ),
    ],
)
def test_what_is_refused_at_the_start_leaves_the_folder_as_it_was(run, tmp_path, changes, message):
    """So the corrected command is not refused for what the first one left."""
    with pytest.raises(UserError, match=message):
        run(tmp_path / "new", changes)
    assert snapshot(tmp_path / "new") is None
    used = tmp_path / "used"
    (used / "run").mkdir(parents=True)
    (used / "run" / "config.yaml").write_text("seed: 3")
    before = snapshot(used)
    with pytest.raises(UserError, match=message):
        run(used, changes, overwrite=True)
    assert snapshot(used) == before


def test_settings_are_printed_when_a_run_begins_and_not_for_a_refusal(run, tmp_path):
    printed = io.StringIO()
    with pytest.raises(UserError):
        run(tmp_path / "out", {"adjust": {"lora_rank": 1000}}, console=Console(file=printed))
    assert "window_size" not in printed.getvalue()
    few = {"transfer": {"max_steps": None, "epochs": 0.5}, "adjust": {"max_steps": 1}}
    run(tmp_path / "out", few, console=Console(file=printed))
    assert "window_size: 4" in printed.getvalue()
    assert re.findall(r"warning: .*", printed.getvalue()) == [
        "warning: stage transfer has 10 updates only, as 38 sequences in batches of 2 are few: give more data, or set"
        " transfer.epochs=6, or a smaller transfer.batch_size"
    ]


def test_killed_in_both_stages_and_resumed_equals_unbroken(run, finished, tmp_path):
    for checkpoint, stage in ((2, "transfer"), (4, "adjust"), (2, "adjust")):
        with failing(loop, "write_checkpoint", checkpoint), pytest.raises(Killed):
            run(tmp_path / "out", resume=True)
        assert (tmp_path / "out" / "run" / "adjust").exists() == (stage == "adjust")
    run(tmp_path / "out", resume=True)
    reference, resumed = (load_file(path / "model.safetensors") for path in (finished[0], tmp_path / "out"))
    assert resumed.keys() == reference.keys()
    for weight, tensor in reference.items():
        assert torch.equal(resumed[weight], tensor), weight


def test_output_folder_is_never_emptied(run, model_dir, tmp_path, monkeypatch):
    output, own = tmp_path / "out", shutil.copytree(model_dir, tmp_path / "own")
    output.mkdir()
    (output / "mine.safetensors").write_text("keep me")
    before = snapshot(output)
    with pytest.raises(UserError, match=r"is not empty.*--overwrite"):
        run(output, SHORT)
    with pytest.raises(UserError, match=r"is not empty and holds no run to resume.*--overwrite"):
        run(output, SHORT, resume=True)
    assert snapshot(output) == before
    run(output, SHORT, overwrite=True)
    run(output, SHORT, overwrite=True)
    assert (output / "mine.safetensors").read_text() == "keep me"
    assert (output / "run-old-1").is_dir()
    with pytest.raises(UserError, match="is a file"):
        run(output / "mine.safetensors", SHORT)
    with pytest.raises(UserError, match="within the softmax window of up to 62 keys"):
        run(tmp_path / "b", {"attention": {"window_size": 1, "sinks": 60}, "data": {"sequence_length": 40}})
    (tmp_path / "adapted").mkdir()
    (tmp_path / "adapted" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter"):
        run(tmp_path / "adapted", SHORT, overwrite=True)
    with pytest.raises(UserError, match="holds the model to be linearized"):
        run(own, SHORT, {"model": {"path": str(own)}}, overwrite=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="holds the model to be linearized"):
        run(own, SHORT, {"model": {"path": "~/own"}}, overwrite=True)
    run(tmp_path / "home", SHORT, {"model": {"path": "~/own"}})


def test_a_folder_that_another_process_uses_is_refused(run, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "out")
    before = snapshot(tmp_path / "out")
    with FolderLock(tmp_path / "out"), pytest.raises(UserError, match="another process of lolcats is using"):
        run(tmp_path / "out", overwrite=True)
    assert snapshot(tmp_path / "out") == before


def test_an_interruption_promises_a_resume_only_where_there_is_one(run, tmp_path):
    nothing, some = "there is nothing to resume, but", r"linearize -o .*out --resume` continues from run/transfer/step-"
    for name, at, message in (
        ("new", "build_datasets", nothing),
        ("out", "AdjustStage", some),
        ("out", "build_datasets", nothing),  # of the run before --overwrite keeps nothing to resume
    ):
        with failing(pipeline, at, 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt, match=message):
            run(tmp_path / name, overwrite=True)
    assert snapshot(tmp_path / "new") is None


def test_a_refused_resume_writes_nothing(run, run_settings, finished, tmp_path):
    """Nor with other rows in the same file, and with other weights under the same path."""
    shutil.copytree(finished[0], tmp_path / "out")
    for changes, named in [
        ({"seed": 1}, "seed"),
        ({"attention": {"window_size": 8}}, "attention.window_size"),
        ({"adjust": {"lora_rank": 4}}, "lora_rank"),
        ({"data": {"sources": [{"path": "records.jsonl"}]}}, "data.sources"),
    ]:
        before = snapshot(tmp_path / "out")
        with pytest.raises(UserError, match=named):
            run(tmp_path / "out", changes, resume=True)
        assert snapshot(tmp_path / "out") == before
    base, records = shutil.copytree(run_settings["model"]["path"], tmp_path / "base"), tmp_path / "records.jsonl"
    lines = Path(run_settings["data"]["sources"][0]["path"]).read_text().splitlines(True)
    records.write_text("".join(lines))
    own = merge(SHORT, {"model": {"path": str(base)}, "data": {"sources": [{"path": str(records)}]}})
    run(tmp_path / "own", own)
    before = snapshot(tmp_path / "own")
    records.write_text("".join(lines[:-2]))
    with pytest.raises(UserError, match=r"training.data.fingerprint"):
        run(tmp_path / "own", own, {"transfer": {"micro_batch_size": 1}}, resume=True)
    records.write_text("".join(lines))
    tensors = load_file(base / "model.safetensors")
    save_file({name: 1.5 * tensor for name, tensor in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"base.weights"):
        run(tmp_path / "own", own, resume=True)
    assert snapshot(tmp_path / "own") == before


def test_a_resumed_run_measures_as_a_new_one(run, run_settings, tmp_path):
    """Other validation rows in the same file, and another budget of exact heads, with the same stages."""
    source = {"sources": run_settings["data"]["sources"]}
    records = tmp_path / "records.jsonl"
    lines = Path(source["sources"][0]["path"]).read_text().splitlines(True)
    records.write_text("".join(lines))
    own = {"data": {"sources": [{"path": str(records)}]}, "transfer": {"data": source}, "adjust": {"enabled": False}}
    gates = {"max_steps": 2, "batch_size": 2, "micro_batch_size": 2, "sequence_length": 512, "eval_every": 2}
    changes = reduce(merge, [SHORT, own, {"gates": gates, "attention": {"exact": "74%"}}])
    first = run(tmp_path / "out", changes)
    records.write_text("".join(lines[::-1]))
    change = merge(changes, {"attention": {"exact": "38%"}})
    found, fresh = run(tmp_path / "out", change, resume=True), run(tmp_path / "fresh", change)
    assert found["perplexity"] == pytest.approx(fresh["perplexity"], rel=1e-6)
    assert all(found["perplexity"][name] != first["perplexity"][name] for name in first["perplexity"])
    assert found["identity"] == fresh["identity"] != first["identity"]


def test_resuming_a_finished_run_trains_nothing(run, finished):
    output, report = finished
    before = (output / "model.safetensors").read_bytes()
    assert run(output, resume=True)["stages"] == report["stages"]
    assert (output / "model.safetensors").read_bytes() == before


def test_automatic_offset_goes_as_far_as_the_model(run, run_settings, tmp_path):
    printed = io.StringIO()
    report = run(tmp_path / "out", SHORT, {"data": {"position_offset": "auto"}}, console=Console(file=printed))
    assert "positions trained: transfer up to 128, of the model's 128\n" in printed.getvalue()
    assert report["data"]["positions"] == 128
    base = load_base_model(LinearizeConfig.from_dict(run_settings).model)[0]
    for length, offset in ((12, 84), (48, 80), (128, 0)):  # seven sequences, or what is left of 128 positions
        data = DataSection(sequence_length=length, position_offset="auto")
        assert fit_positions(data, base).position_offset == offset
    short = fit_positions(DataSection(sequence_length=12), base)
    assert "up to 12, of the model's 128; what lies beyond" in covered_positions({"transfer": short}, base)


def test_lolcats_plus_says_what_a_large_model_needs_before_anything_is_read(tmp_path):
    """Only the configuration of Llama 3 8B is there: neither weights nor data could be read."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8}
    LlamaConfig(**shape, max_position_embeddings=8192, dtype="bfloat16").save_pretrained(tmp_path / "base")
    config = load_recipe("lolcats-plus") | {"model": {"path": str(tmp_path / "base")}}
    config["data"]["sources"] = [{"path": "absent.jsonl"}]
    with pytest.raises(UserError, match=r"keeps 76.2 MiB .* at least --exact-window 77MiB"):
        linearize(LinearizeConfig.from_dict(config), str(tmp_path / "out"), console=Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_stage_1_of_another_run_is_refused_where_there_is_none(run, finished, tmp_path):
    with pytest.raises(UserError, match="--transfer-from takes stage 1"):
        run(tmp_path / "out", {"transfer": {"enabled": False}}, transfer_from=finished[0])


def test_four_bits_are_refused_where_they_cannot_be(run_settings, monkeypatch):
    four = {"load_in_4bit": True}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'lolcats\[quant\]'"):
        load_base_model(ModelSection(**run_settings["model"] | four))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_four_bits_end_to_end(run, tmp_path, model_dir):
    """Trained over rounded weights, exported with exact ones; bitsandbytes needs 64 columns."""
    config = AutoConfig.from_pretrained(model_dir)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "base")
    run(tmp_path / "out", {"model": {"path": str(tmp_path / "base"), "load_in_4bit": True}})
    base, made = load_file(tmp_path / "base" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name, tensor in base.items() if not torch.equal(made[f"model.{name}"], tensor)}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_multimodal_model_end_to_end(run, model_dir, tmp_path):
    """Its language model is trained in both ways of reading it, and the folder loads by itself."""
    build_multimodal("llava").save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "base")
    made = []
    for mode in ("joint", "streaming"):
        blocks = {"block_mode": mode, "block_layers": 1}
        run(tmp_path / mode, {"model": {"path": str(tmp_path / "base")}, "transfer": blocks})
        made.append(load_file(tmp_path / mode / "model.safetensors"))
        assert AutoModelForCausalLM.from_pretrained(tmp_path / mode).config.text_config.model_type == "llama"
    assert made[0].keys() == made[1].keys()
    for name, tensor in made[0].items():
        torch.testing.assert_close(made[1][name], tensor, rtol=1e-3, atol=1e-4)  # float32 over twelve steps


def test_stage_2_may_have_its_own_data(run, run_settings, finished, tmp_path):
    """Its perplexity is measured on the run's data all the same, and stage 1 is that of a run without."""
    mixture = [{"path": "data.sources", "weight": 2.0}, run_settings["data"]["sources"][0] | {"loss_on": "all"}]
    own = {"sources": mixture, "sequence_length": 256}  # of a model with 128 positions
    report = run(tmp_path / "out", {"adjust": {"data": own}}, transfer_from=finished[0])
    assert report["data"]["adjust"]["sequence_length"] == 128
    used = [source["sequences_used"] for source in report["data"]["adjust"]["sources"]]
    assert used[0] == 2 * used[1] > 0
    assert finished[1]["data"]["adjust"] == finished[1]["data"]["transfer"]
    assert report["data"]["transfer"] == finished[1]["data"]["transfer"]
    same, other = (value["perplexity"] for value in (finished[1], report))
    assert (other["teacher"], other["transfer"]) == (same["teacher"], same["transfer"])
    assert other["adjust"] not in (same["adjust"], report["stages"]["adjust"]["best_metric"])
    short = {"adjust": {"enabled": False}}
    with pytest.raises(UserError, match=r"is not empty.*--overwrite"):
        run(tmp_path / "out", short, transfer_from=finished[0])
    run(tmp_path / "out", {"adjust": {"lr": 0.5}}, transfer_from=finished[0], overwrite=True)
    with pytest.raises(UserError, match="is the output itself"):
        run(tmp_path / "out", short, transfer_from=tmp_path / "out", overwrite=True)

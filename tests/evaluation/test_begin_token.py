"""Whether packed sequences begin with the begin token: asked for, as a folder was trained, or as a tokenizer does."""

import json
import shutil

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.config import DataSection
from lolcats.data.retrieval import RetrievalWriter, retrieval_dataset
from lolcats.evaluation.load import with_begin_token


def write_report(folder, **data):
    (folder / "lolcats_report.json").write_text(json.dumps({"config": {"data": data}}))


@pytest.fixture
def begins(model_dir, tmp_path):
    """The tiny model's folder with a tokenizer that begins texts with a begin token, as Gemma's."""
    folder = tmp_path / "begins"
    shutil.copytree(model_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "w0"
    token = ("w0", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w0 $A", special_tokens=[token])
    tokenizer.save_pretrained(folder)
    return folder


def section(**fields):
    return DataSection.model_validate({"sources": [{"path": "demo"}], **fields})


def test_other_models_begin_as_their_tokenizers_do(begins, model_dir):
    for folder, wanted in ((begins, True), (model_dir, False)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert with_begin_token(section(), folder, tokenizer).begin_token is wanted
        assert with_begin_token(section(begin_token=not wanted), folder, tokenizer).begin_token is not wanted
    tokenizer.bos_token = "w0"  # as SmolLM2's, whose first token in chats it is, but not in texts
    assert not with_begin_token(section(), model_dir, tokenizer).begin_token


def test_texts_that_ask_begin_as_the_tokenizer_does(begins, model_dir):
    """Those for gates and for recall: a model whose attention rests on the token is lost without it."""
    for folder, wanted in ((begins, True), (model_dir, False)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        data = retrieval_dataset(tokenizer, "demo", count=12, length=512, seed=0)
        assert (data.input_ids[:, 0] == begin_id(begins)).all() == wanted
        assert not data.label_mask[:, 0].any()
        writer = RetrievalWriter(tokenizer, "test", begin_token=True)
        for kind in ("needle", "phone_book", "copy_100"):
            sample = writer.write(kind, 1024, 0, 0)
            assert len(sample.token_ids) == len(sample.answer) == len(sample.source) == 1024
            assert (sample.token_ids[0] == begin_id(begins)) == wanted
            assert np.array_equal(sample.answer[:1], [-1])
            assert sample.answer.max() >= 0


def begin_id(folder):
    return AutoTokenizer.from_pretrained(folder).bos_token_id


def test_linearized_folders_begin_as_they_were_trained(begins):
    tokenizer = AutoTokenizer.from_pretrained(begins)
    for setting in ({"begin_token": True}, {"begin_token": False}, {}):  # without: it was trained before there was one
        write_report(begins, sequence_length=512, **setting)
        trained = setting.get("begin_token", False)
        assert with_begin_token(section(), begins, tokenizer).begin_token is trained
        assert with_begin_token(section(begin_token=not trained), begins, tokenizer).begin_token is not trained


def test_every_model_has_its_own(begins, model_dir, data_file):
    common = ["--tasks", "perplexity", "--data", str(data_file), "--sequence-length", "48", "--limit", "2"]
    common += ["--device", "cpu", "--json"]

    def measure(*arguments):
        result = CliRunner().invoke(app, ["eval", *map(str, arguments), *common])
        assert result.exit_code == 0, result.output
        return [row["perplexity"] for row in json.loads(result.stdout)["models"]]

    first, second = measure(begins, model_dir)
    assert (first["begin_token"], second["begin_token"]) == (True, False)
    assert first["perplexity"] != second["perplexity"]
    assert measure(begins, "--no-begin-token")[0]["perplexity"] == second["perplexity"]

"""Fixtures for all tests."""

import json
import os
from functools import reduce

import pytest
import torch

# Triton decides when it is imported, which transformers does, whether kernels run on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # else each model that is only named is looked for


def pytest_runtest_setup(item):
    """Through Triton's interpreter the cases of a GPU would be slow: others of their kind run there."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


WORDS = [f"w{index}" for index in range(60)]


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tests run in parallel processes; threads inside each would only compete."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _data_cache(tmp_path_factory):
    """All tests keep away from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOLCATS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seeded():
    """Whatever a test draws from torch's generator does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Folder of a random 2-layer Llama with a word-level tokenizer."""
    from tiny_base import write_base

    folder = tmp_path_factory.mktemp("model")
    write_base(folder, WORDS)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    """Alpaca-like records whose answers repeat the question's words."""
    generator = torch.Generator().manual_seed(1)
    file = tmp_path_factory.mktemp("data") / "records.jsonl"
    with file.open("w") as stream:
        for _ in range(60):
            picked = [WORDS[int(index)] for index in torch.randint(len(WORDS), (6,), generator=generator)]
            record = {"instruction": " ".join(picked), "input": "", "output": " ".join(picked[::-1])}
            stream.write(json.dumps(record) + "\n")
    return file


@pytest.fixture(scope="session")
def haystack(tmp_path_factory):
    """A file of text in the model's words."""
    file = tmp_path_factory.mktemp("haystack") / "text.txt"
    file.write_text("\n\n".join(f"w{n % 60} w{n * 7 % 60} w{n * 11 % 59}" for n in range(2000)))
    return str(file)


@pytest.fixture
def linearized(model_dir, data_file):
    """build(device, loss_on, **attention) -> `model_dir`, converted, with training and validation data."""
    from lolcats.config import AttentionConfig, DataSection, ModelSection
    from lolcats.conversion import convert
    from lolcats.data import build_datasets
    from lolcats.modeling.loading import load_base_model

    def build(device="cpu", loss_on="answer", **attention):
        base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device=device, dtype="float32"))
        data = DataSection(sources=[{"path": str(data_file)}], sequence_length=48, validation_rows=10, loss_on=loss_on)
        train, validation = build_datasets(data, tokenizer, seed=0, progress=False)
        return convert(base, AttentionConfig(**{"window_size": 4, **attention})), train, validation

    return build


@pytest.fixture
def transfer_stage(linearized):
    """build(attention, device, report, **transfer) -> a `TransferStage` and its training data."""
    from lolcats.config import TransferSection
    from lolcats.training.attention_transfer import TransferStage

    def build(attention=None, device="cpu", report=print, **transfer):
        model, train, validation = linearized(device, "all", **(attention or {}))
        section = TransferSection(**{"batch_size": 2, "micro_batch_size": 2, **transfer})
        return TransferStage(model, section, validation, report=report), train

    return build


@pytest.fixture
def adjust_stage(linearized):
    """build(window_size, exact, device, report, **adjust) -> an `AdjustStage` and its training data."""
    from lolcats.config import AdjustSection
    from lolcats.training.finetune import AdjustStage

    def build(window_size=4, exact=(), device="cpu", report=print, **adjust):
        model, train, validation = linearized(device, window_size=window_size, exact=list(exact))
        torch.manual_seed(0)
        section = AdjustSection(**{"batch_size": 2, "micro_batch_size": 2, **adjust})
        return AdjustStage(model, section, validation, report=report), train

    return build


@pytest.fixture
def gradients():
    """Copies of a stage's gradients by name; None where there is none."""

    def read(stage):
        named = (item for block in stage.blocks() for item in block.items())
        return {name: None if p.grad is None else p.grad.clone() for name, p in named}

    return read


@pytest.fixture(scope="session")
def run_settings(model_dir, data_file):
    """Of a run of `linearize` that takes a few seconds; with dropout, so that resuming needs its random state."""
    stage = {"batch_size": 2, "micro_batch_size": 2, "max_steps": 6, "eval_every": 3, "checkpoint_every": 2}
    return {
        "model": {"path": str(model_dir), "device": "cpu"},
        "attention": {"window_size": 4},
        "data": {"sources": [{"path": str(data_file)}], "sequence_length": 48, "validation_rows": 10},
        "transfer": stage,
        "adjust": stage | {"lr": 1e-2, "lora_dropout": 0.1},
    }


@pytest.fixture(scope="session")
def run(run_settings):
    """run(output, *changes, console, **options) -> the report of `linearize` with changed settings."""
    from rich.console import Console

    from lolcats.config import LinearizeConfig, merge
    from lolcats.pipeline import linearize

    def call(output, *changes, **options):
        config = LinearizeConfig.from_dict(reduce(merge, changes, run_settings))
        return linearize(config, output, **{"console": Console(quiet=True), **options})

    return call


@pytest.fixture(scope="session")
def finished(run, tmp_path_factory):
    """A run's output folder and report."""
    output = tmp_path_factory.mktemp("finished") / "out"
    return output, run(output)


@pytest.fixture
def without_masks(monkeypatch):
    """Exact heads' windows as on a GPU, without masks; a list of (keys are missing, queries) of each call."""
    from lolcats.modeling import softmax

    calls, right = [], softmax.window_attention

    def called(q, k, v, window, sinks, **given):
        calls.append((k.shape[2] - q.shape[2] >= max(sinks, 1), q.shape[2]))
        return right(q, k, v, window, sinks, **given)

    def plain_window(q, k, v, window, scale):
        """What FlashAttention's window computes, with the logarithms of its sums."""
        tokens, keys = q.shape[2], k.shape[2]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        query, key = torch.arange(keys - tokens, keys)[:, None], torch.arange(keys)
        seen = (key <= query) & (key > query - window)
        score = (q @ k.mT * (scale or q.shape[3] ** -0.5)).masked_fill(~seen, -torch.inf)
        return score.softmax(-1) @ v, score.logsumexp(-1)

    monkeypatch.setattr(softmax, "takes_window", lambda *tensors: True)
    monkeypatch.setattr(softmax, "window_attention", called)
    monkeypatch.setattr(softmax, "_within", plain_window)
    return calls

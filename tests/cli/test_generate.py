"""`lolcats generate` and `lolcats chat` with a linearized model: files, resuming, conversations."""

import json
import signal

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lolcats.cli.app import app
from lolcats.config import ModelSection
from lolcats.config.attention import AttentionConfig
from lolcats.conversion import convert
from lolcats.modeling.loading import load_base_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ 'w50 ' if message.role == 'user' else 'w51 ' }}{{ message.content }} w52 "
    "{% endfor %}{% if add_generation_prompt %}w51 {% endif %}"
)


@pytest.fixture(scope="module")
def real(model_dir):
    base, tokenizer = load_base_model(ModelSection(path=str(model_dir), device="cpu"))
    tokenizer.chat_template = CHAT_TEMPLATE
    return convert(base, AttentionConfig(window_size=2)), tokenizer


@pytest.fixture
def linearized(real, replace_module, monkeypatch):
    replace_module("lolcats.evaluation.load", load_model=lambda path, **_: real)
    return real


PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w10 w11"]


def by_generate(model, tokenizer):
    """Five tokens after each of the prompts."""
    ids = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]
    whole = [model.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=1)[0, x.shape[1] :] for x in ids]
    return tokenizer.batch_decode(whole, skip_special_tokens=True)


def test_answers_come_in_order_and_equal_generate(cli, linearized):
    expected = by_generate(*linearized)
    options = [item for prompt in PROMPTS for item in ("-p", prompt)]
    result = cli("generate", "out/", *options, "--max-new-tokens", 5, "--batch-size", 2, "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["prompt"], row["text"]) for row in rows] == list(zip(PROMPTS, expected, strict=True))


def test_files_of_prompts(cli, linearized, tmp_path):
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_bytes("w1\r\n\n w2\u2028 w3".encode())  # other line separators belong to the prompt
    lines.write_text('{"prompt": "w1\\nw2"}\n{"prompt": "w4"}\n')
    for file, prompts in ((text, ["w1", " w2\u2028 w3"]), (lines, ["w1\nw2", "w4"])):
        result = cli("generate", "out/", "--prompts-file", file, "--max-new-tokens", 2, "--json")
        assert [json.loads(line)["prompt"] for line in result.stdout.split("\n")[:-1]] == prompts
    for line in ("nonsense", "[1]", '{"text": "a"}', '{"prompt": 5}'):
        lines.write_text(f'{{"prompt": "first"}}\n\n{line}')
        assert "line 3: expected" in cli("generate", "out/", "--prompts-file", lines).stderr


def test_one_prompt_that_fails_is_told_at_the_end(cli, linearized):
    weight, (token,) = linearized[0].get_input_embeddings().weight.data, linearized[1]("w4")["input_ids"]
    before = weight[token].clone()
    weight[token] = float("nan")
    result = cli("generate", "out/", "-p", "w1", "-p", "w4", "--max-new-tokens", 2, "--json")
    weight[token] = before
    reasons = [json.loads(line)["finish_reason"] for line in result.stdout.splitlines()]
    assert (result.exit_code, reasons) == (1, ["length", "error"])
    assert "1 of 2 prompts failed; prompt 1: the model's logits are not finite" in result.stderr


def test_an_original_model_answers_too(cli, model_dir):
    result = cli("generate", model_dir, "-p", "w1", "--max-new-tokens", 3, "--device", "cpu")
    assert (result.exit_code, result.stdout[:2]) == (0, "w1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["--prompts-file", "absent"], "cannot read"),
        (["-p", "w1", "-p", ""], "prompt 1: the prompt has no tokens"),
        (["-p", "w1", "--top-p", "0"], "top_p: Input should be"),
    ],
)
def test_mistakes(cli, linearized, arguments, message):
    result = cli("generate", "out/", *arguments)
    assert (result.exit_code, message in result.stderr) == (1, True)


def chat(*lines, options=()):
    arguments = ["chat", "out/", "--temperature", "0", "--max-new-tokens", "4", *map(str, options)]
    return CliRunner().invoke(app, arguments, input="".join(line + "\n" for line in lines))


def test_a_conversation_from_a_pipe(linearized):
    first = chat("w1 w2", "w3", "w4", "/reset", "w1 w2", "/nonsense", "/quit", "w5")
    assert first.exit_code == 0, first.output
    answers = first.stdout.splitlines()
    assert len(answers) == 4
    assert answers[3] == answers[0]
    assert "/nonsense: expected /reset" in first.stderr


def test_ctrl_c_ends_the_answer_and_nothing_else(linearized, monkeypatch):
    out = Console.out

    def interrupted(console, text, **options):
        out(console, text, **options)
        if text:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(linearized[0].generation_config, "eos_token_id", None)
    monkeypatch.setattr(Console, "out", interrupted)
    answer = chat("w3", "w3", options=["--max-new-tokens", 2000, "--temperature", 3, "--seed", 1])
    assert answer.exit_code == 0, answer.output
    assert len(answer.stdout.splitlines()) == 2
    assert len(answer.stdout) < 2000


def test_chat_seeds(linearized):
    sampled = [chat("w1", "w2", options=["--temperature", 3, "--seed", seed]).stdout for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_chat_refuses_bad_options_and_other_models(linearized, replace_module, real):
    assert "top_p: Input should be" in chat("w1", options=["--top-p", 2]).stderr
    replace_module("lolcats.evaluation.load", load_model=lambda path, **_: (real[0].model, real[1]))
    result = chat("w1")
    assert result.exit_code == 1
    assert "the engine runs linearized models" in result.stderr

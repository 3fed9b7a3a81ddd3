"""Models in the published format: the imported folder computes the paper's equation with their tensors."""

import json

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoModelForCausalLM
from typer.testing import CliRunner

from lolcats.checkpoint.published import import_published
from lolcats.cli.app import app
from lolcats.errors import UserError

HEADS, HEAD_DIM, WINDOW, RANK, ALPHA = 4, 8, 4, 2, 6
SIZES = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}  # outputs; all have 32 inputs
PATH = "model.layers.{}.self_attn"


class Run:
    """A run's configurations and tensors as the published code names them, and the model's logits from the formulas."""

    def __init__(self, model_dir, **attention):
        self.base = model_dir
        self.attention = {
            "attention_type": "lolcats_llama_window_tk",
            "window_size": WINDOW,
            "affine_attention_factors": False,
            "feature_map": "softmax_dim",
            "feature_map_kwargs": {"eps": 1e-12, "fullspace": True},
            "learned_kernel": "untied_head_einsum",
            "learned_kernel_kwargs": {"feature_dim": 3, "skip_connection": False, "bias": False},
            "tie_qk_kernels": False,
        } | attention
        self.softmax = self.attention.get("softmax_attentions", [])
        targets = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0, "target_modules": list(SIZES)}
        self.finetune = {"method": "lora", "kwargs": targets}
        torch.manual_seed(5)
        kernel = self.attention["learned_kernel_kwargs"]
        self.stage_1, self.stage_2 = {}, {}
        for at in (PATH.format(layer) for layer in range(2)):
            if int(at.split(".")[2]) not in self.softmax:
                for which in "q" if self.attention["tie_qk_kernels"] else "qk":
                    self.stage_1[f"{at}.feature_map_{which}.mlp.layer"] = torch.randn(HEADS, HEAD_DIM, 3)
                    if kernel["bias"]:
                        self.stage_1[f"{at}.feature_map_{which}.mlp.bias"] = 20 + torch.randn(
                            1, HEADS, 1, 1
                        )  # or a query has no weight
                if "window" in self.attention["attention_type"]:
                    self.stage_1[f"{at}.window_factors"] = torch.randn(1, HEADS, 1, 1)
            for name, outputs in SIZES.items():
                wrapped = f"base_model.model.{at}.{name}"
                self.stage_2[f"{wrapped}.lora_A.default.weight"] = torch.randn(RANK, 32)
                self.stage_2[f"{wrapped}.lora_B.default.weight"] = 0.2 * torch.randn(outputs, RANK)

    def write(self, folder):
        """Arguments of `import_published`."""
        folder.mkdir(exist_ok=True)
        model = {"model": {"pretrained_model_name_or_path": str(self.base), "torch_dtype": "float32"}}
        (folder / "model.yaml").write_text(yaml.safe_dump(model | {"attention": self.attention}))
        (folder / "finetune.yaml").write_text(yaml.safe_dump({"finetune": self.finetune}))
        torch.save({"model_state_dict": self.stage_1, "step": 7, "eval/loss": 0.5}, folder / "distill.pt")
        torch.save({"model_state_dict": self.stage_2}, folder / "finetune.pt")
        weights = [str(folder / "distill.pt"), str(folder / "finetune.pt")]
        return weights, [folder / "model.yaml", folder / "finetune.yaml"], folder / "out"

    def features(self, x_BHTD, layer, which):
        which = "q" if self.attention["tie_qk_kernels"] else which
        at = f"{PATH.format(layer)}.feature_map_{which}.mlp"
        projected = torch.einsum("hdp,bhtd->bhtp", self.stage_1[f"{at}.layer"], x_BHTD)
        if self.attention["feature_map"] == "relu":
            return (projected + self.stage_1.get(f"{at}.bias", 0.0)).relu()
        return torch.cat([projected.softmax(-1), (-projected).softmax(-1)], dim=-1)

    @torch.no_grad()
    def logits(self, input_ids):
        """Of the base model with the attention of the paper (hybrid_linear_swa), all weights written out."""
        kind = self.attention["attention_type"].removeprefix("lolcats_llama")

        def attend(module, q, k, v, attention_mask, scaling, **_):
            k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
            n, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
            past = j <= n
            scores = q @ k.mT * scaling
            if module.layer_idx in self.softmax:
                return (scores.masked_fill(~past, -torch.inf).softmax(-1) @ v).transpose(1, 2), None
            in_window = (
                past
                & {
                    "_window_tk": j // WINDOW >= n // WINDOW - 1,
                    "_window_sw": j > n - WINDOW,
                    "": torch.zeros_like(past),
                }[kind]
            )
            linear = self.features(q, module.layer_idx, "q") @ self.features(k, module.layer_idx, "k").mT
            weights = linear * (past & ~in_window)
            if kind:
                scores = scores.masked_fill(~in_window, -torch.inf)
                gamma = self.stage_1[f"{PATH.format(module.layer_idx)}.window_factors"].sigmoid()
                weights = weights + gamma * (scores - scores.amax(-1, keepdim=True)).exp()
            return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2), None

        AttentionInterface.register("published_equation", attend)
        model = AutoModelForCausalLM.from_pretrained(self.base, attn_implementation="published_equation")
        for name, b in self.stage_2.items():
            if ".lora_B." in name:
                path = name.removeprefix("base_model.model.").partition(".lora_B")[0]
                model.get_submodule(path).weight += ALPHA / RANK * b @ self.stage_2[name.replace("lora_B", "lora_A")]
        return model(input_ids).logits


RELU = {"feature_dim": 3, "skip_connection": False, "bias": True}
RUNS = {
    "terraced": {},
    "sliding": {"attention_type": "lolcats_llama_window_sw"},
    "sliding, tied, one softmax layer": {
        "attention_type": "lolcats_llama_window_sw",
        "tie_qk_kernels": True,
        "softmax_attentions": [0],
    },
    "linear alone": {"attention_type": "lolcats_llama", "feature_map": "relu", "learned_kernel_kwargs": RELU},
}


@pytest.mark.parametrize("attention", RUNS.values(), ids=RUNS)
def test_the_imported_folder_computes_the_paper_s_equation(model_dir, tmp_path, attention):
    run = Run(model_dir, **attention)
    weights, configurations, output = run.write(tmp_path)
    import_published(weights, configurations, output)
    card = ModelCard.load(output / "README.md")
    assert card.data.base_model == model_dir.name
    assert str(model_dir.parent) not in card.content
    model = AutoModelForCausalLM.from_pretrained(output)
    input_ids = torch.randint(2, 62, (2, 5 * WINDOW))
    with torch.no_grad():
        # float32, two layers; the same sums in another order
        torch.testing.assert_close(model(input_ids).logits, run.logits(input_ids), rtol=1e-4, atol=1e-4)


def test_adapters_of_peft_and_tensors_in_safetensors(model_dir, tmp_path):
    """The same folder from other files: a folder of safetensors, names as PEFT saves them, settings in JSON."""
    run = Run(model_dir)
    weights, configurations, output = run.write(tmp_path / "a")
    import_published(weights, configurations, output)
    other = tmp_path / "b"
    (other / "weights").mkdir(parents=True)
    save_file({f"model.{name}": x for name, x in run.stage_1.items()}, other / "weights/distill.safetensors")
    adapters = {name.replace(".default", ""): x for name, x in run.stage_2.items()}
    save_file(adapters, other / "weights/adapter_model.safetensors")
    (other / "config.json").write_text(json.dumps({"attention": run.attention}))
    (other / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **run.finetune["kwargs"]}))
    options = ["--config", other / "config.json", "--config", other / "adapter_config.json", "--model", model_dir]
    arguments = ["import", other / "weights", *options, "-o", other / "out"]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    first, second = (
        AutoModelForCausalLM.from_pretrained(folder / "out").state_dict() for folder in (tmp_path / "a", other)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


FIRST, SECOND = (PATH.format(layer) for layer in (0, 1))
LORA_B = f"base_model.model.{FIRST}.o_proj.lora_B.default.weight"
OTHER_SHAPE = {f"{FIRST}.window_factors": torch.zeros(1, 2, 1, 1)}
CONVOLUTION = {f"{SECOND}.short_conv": torch.zeros(3)}
MISTAKES = [
    (lambda run: run.stage_1.pop(f"{SECOND}.feature_map_k.mlp.layer"), r"no tensor layers\.1\S*\.feature_map_k"),
    (lambda run: run.stage_2.pop(LORA_B), r"no tensor layers\.0\.self_attn\.o_proj\.lora_B"),
    (lambda run: run.stage_1.update(CONVOLUTION), r"no place for the tensors layers\.1\.self_attn\.short_conv"),
    (lambda run: run.stage_1.update(OTHER_SHAPE), r"window_factors has shape \[1, 2, 1, 1\]; expected \[1, 4, 1, 1\]"),
    (lambda run: run.finetune["kwargs"].update(r=4), r"q_proj\.lora_A\S* has shape \[2, 32\]; expected \[4, 32\]"),
    (lambda run: setattr(run, "finetune", None), "`finetune`"),
    (lambda run: run.attention.update(affine_attention_factors=True), "affine_attention_factors=True .*expected False"),
    (lambda run: run.attention.update(attention_type="lolcats_llama_window_sw_scale"), "lolcats_llama_window_sw_scale"),
    (lambda run: run.stage_1.update({f"{FIRST}.window_factors": "0.1"}), r"else than named tensors: model\.layers\.0"),
    (lambda run: run.stage_1.update(x=Run), "something else than named tensors, which is not loaded"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_what_does_not_fit_is_named_and_nothing_is_written(model_dir, tmp_path, mistake, message):
    run = Run(model_dir)
    mistake(run)
    *given, output = run.write(tmp_path)
    with pytest.raises(UserError, match=message):
        import_published(*given, output)
    assert not output.exists()

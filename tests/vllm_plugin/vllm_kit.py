"""Tiny linearized folders, vLLM engines on them, and what transformers answers."""

import gc
import math
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from generation_kit import make_model, make_tokenizer, random_tokens
from transformers import AutoModelForCausalLM

from lolcats.checkpoint.write import export

NEW_TOKENS = 24
# Around the borders of the window's blocks (16 tokens) and of vLLM's blocks (64), and a prompt of one token.
LENGTHS = (1, 5, 31, 32, 33, 63, 64, 65, 150, 300)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
# How a GPU decodes: full CUDA graphs, no compilation.
GRAPHS = {
    "enforce_eager": False,
    "max_num_seqs": 16,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}
# float32 on both sides; sums in another order: 2e-5 at most was seen.
TOLERANCE = 1e-4
ON_GPU = 1e-3  # in kernels that sum in another order


@dataclass
class Answer:
    """Greedy tokens, and log-probabilities: of the prompt's tokens but the first, if asked for, and of these."""

    tokens: list[int]
    logprobs: list[float]


def make_folder(path: Path, attention: dict | None = None, **changes: Any) -> Path:
    """Export a random model with three layers and feature maps away from their start; heads of 32 dimensions."""
    shape = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 1024}
    settings = {"window_size": 16} | (attention or {})
    model = make_model(dtype=torch.float32, attention=settings, **(shape | changes))
    return export_random(model, path)


def export_random(model: Any, path: Path) -> Path:
    """Export a model for which the tokenizer of bytes will do."""
    export(model, make_tokenizer(), path, report={}, card="")
    return path


@cache
@torch.no_grad()
def transformers_answers(
    path: Path,
    new: int = NEW_TOKENS,
    prompts: int = len(PROMPTS),
    of_prompts: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Answer]:
    """Of the exported folder in transformers, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    answers = []
    for prompt in PROMPTS[:prompts]:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "min_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **settings)
        logprob_TV = model(whole).logits[0, :-1].float().log_softmax(-1)
        logprobs = logprob_TV.gather(1, whole[0, 1:, None])[:, 0].tolist()
        answers.append(Answer(whole[0, len(prompt) :].tolist(), logprobs[0 if of_prompts else len(prompt) - 1 :]))
    return answers


def rms_error(answers: list[Answer], right: list[Answer]) -> float:
    """Of the log-probabilities of the prompts' tokens but the first."""
    differences = [
        x - y
        for prompt, answer, expected in zip(PROMPTS, answers, right, strict=True)
        for x, y in zip(answer.logprobs[: len(prompt) - 1], expected.logprobs, strict=False)
    ]
    return float(torch.tensor(differences).square().mean().sqrt())


class Served:
    """An engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def answers(self, prompts: list[list[int]], new: int = NEW_TOKENS, of_prompts: bool = False) -> list[Answer]:
        """Of all prompts at once."""
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, self.sampling(new, of_prompts), use_tqdm=False)
        return [self.answer(output) for output in outputs]

    def sampling(self, new: int, of_prompts: bool = False) -> Any:
        from vllm import SamplingParams

        more = {"prompt_logprobs": 0} if of_prompts else {}
        return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0, **more)

    def answer(self, output: Any) -> Answer:
        new = output.outputs[0]
        prompt = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=False)
        chosen = chain(prompt, zip(new.token_ids, new.logprobs, strict=True))
        return Answer(list(new.token_ids), [entry[token].logprob for token, entry in chosen])

    def metric(self, name: str) -> int:
        """A counter of vLLM since the engine's start."""
        return next(metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")

    def free_pages(self) -> int:
        """Pages of the cache that no sequence has; those kept for their prefixes are free."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def config(self) -> Any:
        return self.llm.llm_engine.vllm_config


def start(path: Path, **options: Any) -> Served:
    """An engine for up to 512 tokens a request; without compilation and prefix caching unless asked."""
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.1,  # of a GPU that other programs may use too; it bounds nothing here
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    return Served(LLM(str(path), **(defaults | options)))


def stop() -> None:
    """Free what engines of this process hold, so that another can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def assert_same(answers: list[Answer], expected: list[Answer], tolerance: float = TOLERANCE) -> None:
    """The first token that differs must be as likely as the expected one; what follows it is not compared."""
    assert len(answers) == len(expected)
    for prompt, answer, right in zip(PROMPTS, answers, expected, strict=False):
        what = f"prompt of {len(prompt)} tokens"
        assert len(answer.tokens) == len(right.tokens), what
        given = len(right.logprobs) - len(right.tokens)  # of the prompt
        pairs = enumerate(zip(answer.tokens, right.tokens, strict=True))
        compared = given + next((i + 1 for i, (x, y) in pairs if x != y), len(right.tokens))
        both = list(zip(answer.logprobs, right.logprobs, strict=True))[:compared]
        worst = max(abs(x - y) for x, y in both)
        assert worst <= tolerance, f"{what}: log-probabilities differ by {worst:.1e}"
        assert all(math.isfinite(x) for x in answer.logprobs), what

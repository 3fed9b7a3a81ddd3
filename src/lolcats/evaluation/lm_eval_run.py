"""One model on lm-eval tasks: scores and standard errors, by lm-eval's Hugging Face adapter and our engine."""

from __future__ import annotations

import functools
import gc
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lm_eval import evaluator
from lm_eval.api.group import Group
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import env
from tqdm import tqdm

from lolcats.errors import UserError
from lolcats.evaluation.tasks import flat
from lolcats.generation.engine import Engine, slots_in_memory
from lolcats.generation.sampling import SamplingParams
from lolcats.modeling.cache import longrope_border, recurrent_layers
from lolcats.modeling.model import LolcatsForCausalLM
from lolcats.modeling.softmax import any_length

SLOTS = 256  # most answers that are generated at a time


class LolcatsLM(HFLM):
    """Any causal language model, linearized or not; the engine generates the answers of those that it runs."""

    max_gen_toks = 512
    """Of a task that names no number; lm-eval's 256 cut worked answers of chat models."""

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers by the engine, longest sequences first; through `generate()` of a model that it does not run."""
        config = self.model.config
        if not isinstance(self.model, LolcatsForCausalLM) or recurrent_layers(config) or longrope_border(config):
            return super().generate_until(requests, disable_tqdm)
        by_length, cut = defaultdict(list), 0
        for index, request in enumerate(requests):
            context, options = request.args
            options = normalize_gen_kwargs(options, self.max_gen_toks)
            new = min(options["max_gen_toks"], self.max_length // 2)
            sampling = {name: options[name] for name in ("temperature", "top_p", "top_k") if name in options}
            stop = tuple(text for text in options["until"] if text)
            params = SamplingParams(max_new_tokens=new, stop=stop, seed=index, **sampling)
            prompt = self.tok_encode(context)
            cut += len(prompt) > self.max_length - new
            prompt = prompt[new - self.max_length :]
            length = min(max(2048, 1 << (len(prompt) + new - 1).bit_length()), self.max_length)
            by_length[length].append((index, (prompt, params)))
        if cut:
            text = f"{cut} of {len(requests)} prompts are cut to the model's {self.max_length} tokens, with the answer"
            warnings.warn(text, stacklevel=2)
        answers: dict[int, str] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="answers")
        for length, group in sorted(by_length.items(), reverse=True):
            slots = slots_in_memory(self.model, length, min(SLOTS, len(group)))
            engine = Engine(self.model, self.tokenizer, max_slots=slots, max_length=length, prefill_chunk=4096)
            for index, answer in [(index, engine.submit(*request, stream=False)) for index, request in group]:
                answers[index] = answer.result().text
                bar.update()
            engine.shutdown()
            del engine
            gc.collect()
            torch.cuda.empty_cache()  # `slots_in_memory` asks what is free
        return [answers[index] for index in range(len(requests))]


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Mapping[str, Any],
    *,
    limit: int | None = None,
    batch_size: int = 16,
    chat: bool | None = False,
    run_code: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measure `model` on tasks; the engine generates if it is linearized or `keep_softmax` made it.

    Args:
        tasks: name in the report -> lm-eval's `Task` or `Group` (`load_tasks`, or any others).
        limit: questions of each lm-eval task (each subject of MMLU); None: all.
        chat: prompts in the chat template, few-shot examples as turns; None: those of tasks that generate, if there
            is one.
        run_code: whether programs that the model writes may run.

    Returns:
        For each name: value and stderr (shares, not percent), metric, shots, questions, lm-eval's task, whether in the
        chat template and, for groups of several tasks, those of each part.
    """
    template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not template:
        raise UserError("--apply-chat-template: this model's tokenizer has no chat template")
    results: dict[str, dict[str, Any]] = {}
    with lm_eval_set_up():
        device = str(next(model.parameters()).device)
        lm = LolcatsLM(model, tokenizer=tokenizer, batch_size=batch_size, device=device, softmax_dtype="float32")
        # lm-eval takes one form of prompts a call: tasks in the chat template are measured apart.
        generate = {
            name: all(member.OUTPUT_TYPE == "generate_until" for member in _members(task))
            for name, task in tasks.items()
        }
        chats = {name: template and (generate[name] if chat is None else chat) for name in tasks}
        for in_chat in set(chats.values()):
            part = {name: task for name, task in tasks.items() if chats[name] == in_chat}
            found = evaluator.evaluate(
                lm=lm,
                task_dict=flat(part),
                limit=limit,
                bootstrap_iters=1000,
                log_samples=False,
                apply_chat_template=in_chat,
                fewshot_as_multiturn=in_chat,
                confirm_run_unsafe_code=run_code,
            )
            results |= {name: _summary(name, task, found) | {"chat_template": in_chat} for name, task in part.items()}
    return {name: results[name] for name in tasks}


def _members(task: Any) -> list[Any]:
    return task.get_all_tasks() if isinstance(task, Group) else [task]


def _summary(name: str, task: Any, found: Any) -> dict[str, Any]:
    members = [member.task_name for member in _members(task)]
    rows, row = found["results"], found["results"][name if len(members) > 1 else members[0]]
    metric = getattr(task, "main_metric", None)
    if metric is None:  # normalised accuracy if there is one, else the first
        found_metrics = [key.split(",")[0] for key in row if "," in key and "_stderr" not in key]
        metric = "acc_norm" if "acc_norm" in found_metrics else found_metrics[0]
    counts = {member: int(found["n-samples"][member]["effective"]) for member in members}
    summary: dict[str, Any] = {
        "metric": metric,
        "shots": found["n-shot"].get(members[0]),
        "questions": sum(counts.values()),
        **_measured(row, metric),
        "version": found["versions"].get(members[0]),
        "task": found["configs"][members[0]].get("task_alias") or members[0],
    }
    if len(members) > 1:
        summary["parts"] = {
            member: {**_measured(rows[member], metric), "questions": counts[member]} for member in members
        }
    return summary


def _measured(row: dict[str, Any], metric: str) -> dict[str, Any]:
    key = metric if metric in row else next(key for key in row if key.split(",")[0] == metric)
    stderr: Any = row.get(key.replace(",", "_stderr,", 1))  # "N/A" where there is none
    known = isinstance(stderr, int | float) and math.isfinite(stderr)
    return {"value": float(row[key]), "stderr": float(stderr) if known else None}


@contextmanager
def lm_eval_set_up() -> Iterator[None]:
    """lm-eval without its log lines, with attention for `any_length`, and each Jinja template compiled once instead of
    for every question, which for MMLU takes minutes."""
    logger, template = logging.getLogger("lm_eval"), functools.lru_cache(maxsize=1024)(env.from_string)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with any_length(), patch.object(env, "from_string", template):
            yield
    finally:
        logger.setLevel(level)

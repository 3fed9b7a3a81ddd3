"""What `lolcats eval` measures, and how much of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lolcats.config import DataSection, Section
from lolcats.evaluation.tasks import OWN, PAPER_NAMES


def _split(value: Any) -> Any:
    """`"paper,passkey"` -> names, each once, in their order."""
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else list(value)
    if not names:
        raise ValueError("expected names, for example paper or piqa,mmlu,passkey")
    return list(dict.fromkeys(part for name in names for part in (PAPER_NAMES if name == "paper" else (name,))))


def _numbers(value: Any) -> Any:
    try:
        return [int(part) for part in value.split(",")] if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError("expected numbers separated by commas, for example 2048,4096") from error


class EvalOptions(Section, frozen=True):
    """What is measured, and how much of it."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(_split)] = Field("paper", validate_default=True)
    """`paper` (PIQA, ARC-e, ARC-c, HellaSwag, WinoGrande, 5-shot MMLU), names of lm-eval tasks (gsm8k, humaneval, ...;
    `humaneval_4k`: behind 4k tokens of other code; `gsm8k_8shot`), `topics` (many-shot classification), `recall`,
    `passkey`, `ruler`, `perplexity` and `esl` (of --data); separated by commas."""
    data_dir: str | None = None
    """Folder with TASK/SPLIT.jsonl(.gz) instead of data from the hub."""
    apply_chat_template: bool | None = None
    """Ask all lm-eval tasks in the chat template, or none. Default: those that generate."""
    run_code: bool = False
    """Run programs that the model writes (humaneval, mbpp): limits of time and memory, no sandbox."""
    limit: int | None = Field(None, ge=1)
    """Only the first questions of each task (each MMLU subject); so many texts of each kind and length of recall, ruler
    (50) and passkey (100), sequences of perplexity and esl."""
    seed: int = Field(0, ge=0)
    """Seed of recall, passkeys and drawn examples."""
    batch_size: int = Field(16, ge=1)
    """Sequences per forward pass."""
    lengths: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_numbers)] = None
    """recall, ruler (1024 to 8192), passkey (2048 to 10240): tokens of the texts."""
    haystack: str = "demo"
    """recall, ruler: data source with the text around; `demo`: shipped textbooks."""
    data: DataSection | None = None
    """Text for perplexity and esl."""
    model_options: dict[str, Any] = {}
    """How models are loaded; written into the report."""

    @property
    def lm_eval_tasks(self) -> list[str]:
        return [name for name in self.tasks if name not in OWN]

"""vLLM engines over tiny random linearized folders; vllm_kit.py has what they share."""

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("vllm_kit")

HAS_VLLM = importlib.util.find_spec("vllm") is not None
# `make test-vllm` runs these in an environment with vLLM's CPU build; elsewhere only what needs no vLLM is collected.
collect_ignore = [] if HAS_VLLM else [path.name for path in Path(__file__).parent.glob("test_vllm_*.py")]

# An engine in the tests' own process starts in two seconds, one in processes of its own in twenty.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Of a process that has used CUDA no rank can be forked.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
# Otherwise vLLM ties this process to a core of its choice.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
# vLLM's Triton attention, which it takes on a GPU for float32, would multiply in tf32.
os.environ["TRITON_F32_DEFAULT"] = "ieee"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
if HAS_VLLM and not torch.cuda.is_available():
    # Our kernels, in Triton's interpreter a hundred times slower than the reference, go there only if it says 1.
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "TRITON_INTERPRET": "on"}
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # its kernels go there, too
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise it does without Triton where there is no driver


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a linearized model by the options of `vllm_kit.make_folder`; made once for the same options."""
    from vllm_kit import make_folder

    made: dict[str, Path] = {}

    def make(*args: Any, **options: Any) -> Path:
        key = repr((args, sorted(options.items())))
        if key not in made:
            made[key] = make_folder(tmp_path_factory.mktemp("linearized"), *args, **options)
        return made[key]

    return make


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Starts an engine, see `vllm_kit.start`; it ends with the test."""
    from vllm_kit import start, stop

    def run(path: Path, **options: Any) -> Any:
        return start(path, **options)

    yield run
    stop()


@pytest.fixture(autouse=HAS_VLLM)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often our scheduler asked vLLM's books, and not: then they would give nothing, and change nothing."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from lolcats.vllm_plugin import scheduler

    own, theirs, counts = scheduler.scheduler, KVCacheManager.allocate_slots, Counter[str]()

    def state(books: Any) -> Any:
        pool, groups = books.block_pool, books.coordinator.single_type_managers
        kept = [{name: x for name, x in vars(each).items() if isinstance(x, dict | set | list)} for each in groups]
        for group in kept:
            group["req_to_blocks"] = {name: [*map(id, x)] for name, x in group["req_to_blocks"].items() if x}
        return pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block), repr(kept)

    def ask(*args: Any, **kwargs: Any) -> Any:
        counts["asked"] += 1
        return theirs(*args, **kwargs)

    def scheduled(**given: Any) -> Any:
        made = own(**given)
        books = made.kv_cache_manager
        allocate = books.allocate_slots

        def allocate_slots(*args: Any, **kwargs: Any) -> Any:
            asked = counts["asked"]
            found = allocate(*args, **kwargs)
            if counts["asked"] == asked:
                counts["not asked"] += 1
                before = state(books)
                assert not any(theirs(books, *args, **kwargs).blocks)
                assert state(books) == before
            return found

        books.allocate_slots = allocate_slots
        return made

    monkeypatch.setattr(KVCacheManager, "allocate_slots", ask)
    monkeypatch.setattr(scheduler, "scheduler", scheduled)
    return counts

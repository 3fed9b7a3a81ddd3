"""Many requests of mixed lengths, some cancelled at any moment: every answer as alone, and no page is left behind.

LOLCATS_LOAD_REQUESTS=2000 makes it longer. On a GPU single tokens come from full CUDA graphs.
"""

import os
import random

import torch
from generation_kit import random_tokens
from test_vllm_answers import ALL_KINDS
from vllm_kit import GRAPHS, Answer, Served

REQUESTS = int(os.environ.get("LOLCATS_LOAD_REQUESTS", "60"))
MOST_NEW, AT_ONCE = 40, 24
CANCELLED = 0.25
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate([1, 2, 15, 16, 17, 40, 64, 65, 130, 200, 310])]
# A token may be another where float32 sums in another order leave two equally likely; what follows is not compared.
TIE = 1e-3


def load(served: Served, expected: list[Answer], requests: int, seed: int) -> dict[str, int]:
    """How many requests were answered and cancelled, and the fewest pages that were free.

    Raises:
        AssertionError: an answer that is not as `expected`, of the same prompt alone, says.
    """
    choice = random.Random(seed)
    engine = served.llm.llm_engine
    counts = {"answered": 0, "cancelled": 0, "fewest_free": served.free_pages()}
    running: dict[str, tuple[int, int, int | None]] = {}  # prompt, new tokens, and the step at which it is cancelled
    step = begun = 0
    while running or begun < requests:
        while begun < requests and len(running) < AT_ONCE:
            prompt, new = choice.randrange(len(PROMPTS)), choice.randint(1, MOST_NEW)
            cancelled_at = step + choice.randrange(MOST_NEW) if choice.random() < CANCELLED else None
            engine.add_request(f"{seed}-{begun}", {"prompt_token_ids": PROMPTS[prompt]}, served.sampling(new))
            running[f"{seed}-{begun}"] = prompt, new, cancelled_at
            begun += 1
        for name in [name for name, (_, _, at) in running.items() if at is not None and at <= step]:
            engine.abort_request([name])
            del running[name]
            counts["cancelled"] += 1
        for output in engine.step():
            if output.finished and output.request_id in running:
                prompt, new, _ = running.pop(output.request_id)
                check(served.answer(output), expected[prompt], new)
                counts["answered"] += 1
        counts["fewest_free"] = min(counts["fewest_free"], served.free_pages())
        step += 1
    while engine.has_unfinished_requests():
        engine.step()
    return counts


def check(answer: Answer, alone: Answer, new: int) -> None:
    assert len(answer.tokens) == new
    each = zip(answer.tokens, answer.logprobs, alone.tokens, alone.logprobs, strict=False)
    for token, logprob, right, expected in each:
        assert abs(logprob - expected) < TIE, (answer, alone)
        if token != right:
            return


def test_load(folder, serve, at_once) -> None:
    """In a cache for a few of the sequences, so that some are preempted."""
    graphs = GRAPHS if torch.cuda.is_available() else {}
    options = {"max_num_batched_tokens": 96, "kv_cache_memory_bytes": 5 << 20, "enable_prefix_caching": True}
    served = serve(folder(**ALL_KINDS), block_size=64, **options, **graphs)
    free = served.free_pages()
    expected = [served.answers([prompt], MOST_NEW)[0] for prompt in PROMPTS]
    assert served.free_pages() == free
    counts = load(served, expected, REQUESTS, seed=1)
    print(counts, free, served.metric("num_preemptions"))
    assert counts["answered"] + counts["cancelled"] == REQUESTS
    assert min(counts["answered"], counts["cancelled"]) > REQUESTS / 10
    assert served.metric("num_preemptions") > 0
    assert counts["fewest_free"] < free  # the count sees pages that are in use
    assert served.free_pages() == free
    assert min(at_once["asked"], at_once["not asked"]) > 100, at_once

"""Plans of block-wise attention transfer: memory of the largest block, disk for hidden states, the best block size.

Hidden states between two blocks take 2 T d bytes for T tokens of d dimensions in 16 bits; all boundaries of L / k
blocks together what arXiv:2410.10254 writes as 2 T d L / k (there, the embeddings in front of the first block
count, too; here the first block embeds its tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lolcats.errors import UserError
from lolcats.parallel.blockwise.layers import divide, merge
from lolcats.plan import memory, work
from lolcats.plan.gpus import GB
from lolcats.plan.memory import Step
from lolcats.plan.request import ModePlan, Request
from lolcats.plan.shape import LayerShape, ModelShape
from lolcats.plan.throughput import rate

Block = tuple[LayerShape, ...]


def split(shape: ModelShape, block_layers: int) -> list[Block]:
    """The layers of every block."""
    return [shape.layers[block.begin : block.end] for block in divide(list(shape.linear_layers), block_layers)]


def caches_at_once(blocks: int, *, streaming: bool) -> int:
    """Boundaries whose hidden states exist at the same time: a block's inputs and outputs, or all."""
    return min(2, blocks - 1) if streaming else blocks - 1


def streaming(shape: ModelShape, request: Request) -> ModePlan:
    """One block's weights at a time on one GPU."""

    def of(block_layers: int, size: int) -> ModePlan:
        blocks = split(shape, block_layers)
        plan = _plan("streaming", shape, request, blocks, block_layers, size)
        cache = memory.activation_cache_bytes(request.tokens, request.sequence_length, shape.hidden)
        moved = (len(blocks) - 1) * cache * (1 + request.epochs) + _weights(shape)
        return replace(
            plan,
            seconds=plan.seconds + moved / (request.disk_gb_s * GB),
            disk=caches_at_once(len(blocks), streaming=True) * cache,
        )

    return _best(of, shape, request)


def jobs(shape: ModelShape, request: Request) -> ModePlan:
    """One pass of the frozen model that writes every block's inputs, then a job for each block."""

    def of(block_layers: int, size: int) -> ModePlan:
        blocks = split(shape, block_layers)
        plan = _plan("jobs", shape, request, blocks, block_layers, size)
        cache = memory.activation_cache_bytes(request.tokens, request.sequence_length, shape.hidden)
        boundaries = len(blocks) - 1
        tokens, length = request.tokens, request.sequence_length
        prepare = tokens * sum(work.frozen(block, length) for block in blocks[:-1])
        forward = rate(request.gpu, "frozen", shape.hidden, size * length).tflop_s * 1e12
        longest = max(_block_flops(block, shape, request, to_the_end=False) for block in blocks)
        rounds = -(-len(blocks) // request.gpus)
        moved = cache * boundaries * (2 + request.epochs) + 2 * _weights(shape)  # prepared: written, read; then trained
        return replace(
            plan,
            gpus=request.gpus,
            flops=plan.flops + prepare,
            seconds=prepare / forward + rounds * longest / plan.rate.tflop_s / 1e12 + moved / (request.disk_gb_s * GB),
            disk=boundaries * cache,
        )

    return _best(of, shape, request)


def pipelined(shape: ModelShape, request: Request) -> ModePlan:
    """Every GPU holds consecutive blocks and trains them while micro-batches flow through."""
    gpus = request.gpus

    def of(block_layers: int, size: int) -> ModePlan:
        divided = divide(list(shape.linear_layers), block_layers)
        enough = len(divided) >= gpus
        stages = [shape.layers[part.begin : part.end] for part in (merge(divided, gpus) if enough else divided)]
        plan = _plan("pipelined", shape, request, stages, block_layers, size)
        in_transit = 2 * Step(size, request.sequence_length).row(shape.hidden)
        longest = max(_block_flops(stage, shape, request, to_the_end=True) for stage in stages)
        missing = f"{len(divided)} blocks are not enough for {gpus} GPUs; use --block-layers {_at_most(shape, gpus)}"
        return replace(
            plan,
            gpus=gpus,
            blocks=len(divided),
            memory=replace(plan.memory, buffers=plan.memory.buffers + in_transit),
            seconds=longest / plan.rate.tflop_s / 1e12,
            missing=None if enough else missing,
        )

    return _best(of, shape, request)


def with_missing_memory(plan: ModePlan, request: Request) -> ModePlan:
    """The plan with a sentence that says how much it lacks."""
    needed, given = plan.needed / GB, request.memory_bytes / GB
    machines = f"on each of {plan.gpus} GPUs with" if plan.gpus > 1 else "on a GPU with"
    return replace(plan, missing=f"needs {needed:.0f} GB {machines} {given:g} GB")


def _plan(
    mode: str, shape: ModelShape, request: Request, blocks: list[Block], block_layers: int, size: int
) -> ModePlan:
    step = Step(size, request.sequence_length)
    held = [
        memory.transfer(shape, block, step, beside=shape.embedding if order == 0 else 0)
        for order, block in enumerate(blocks)
    ]
    last = len(blocks) - 1
    flops = sum(
        _block_flops(block, shape, request, to_the_end=mode != "jobs" and order < last)
        for order, block in enumerate(blocks)
    )
    speed = rate(request.gpu, "transfer", shape.hidden, step.tokens)
    return ModePlan(
        stage="transfer",
        mode=mode,
        gpus=1,
        micro_batch_size=size,
        memory=max(held, key=lambda found: found.total),
        trained=shape.feature_parameters,
        flops=flops,
        seconds=flops / speed.tflop_s / 1e12,
        rate=speed,
        block_layers=block_layers,
        blocks=len(blocks),
    )


def _block_flops(block: Block, shape: ModelShape, request: Request, *, to_the_end: bool) -> float:
    per_token = work.transfer(block, request.sequence_length, shape.mean_window, to_the_end=to_the_end)
    return request.trained_tokens * per_token


def _best(of: Callable[[int, int], ModePlan], shape: ModelShape, request: Request) -> ModePlan:
    """The fastest plan that fits, among equals the one with the least disk, then with the largest blocks; if none
    fits, the smallest, with what is missing."""
    layers = len(shape.linear_layers)
    if request.block_layers is not None and request.block_layers > layers:
        raise UserError(f"--block-layers {request.block_layers}: the model has {layers} layers to linearize")
    sizes = [request.block_layers] if request.block_layers else _block_sizes(layers)
    plans = []
    for block_layers in sizes:
        tried = [of(block_layers, size) for size in request.micro_batches()]
        plans.append(next((plan for plan in tried if _fits(plan, request)), tried[-1]))
    fitting = [plan for plan in plans if _fits(plan, request)]
    if fitting:
        return min(fitting, key=lambda plan: (round(plan.seconds), plan.disk, -(plan.block_layers or 0)))
    in_memory = [plan for plan in plans if plan.needed <= request.memory_bytes]
    if in_memory:
        return _with_missing_disk(min(in_memory, key=lambda plan: plan.disk), request)
    plan = min(plans, key=lambda plan: plan.needed)
    if plan.missing is not None:
        return plan
    missing = with_missing_memory(plan, request)
    smaller = _largest_that_fits(of, layers, request) if request.block_layers else None
    return missing if smaller is None else replace(missing, missing=f"{missing.missing}; use --block-layers {smaller}")


def _with_missing_disk(plan: ModePlan, request: Request) -> ModePlan:
    if plan.missing is not None or request.disk_gb is None:
        return plan
    return replace(plan, missing=f"needs {plan.disk / GB:.0f} GB of disk, has {request.disk_gb:.0f} GB")


def _fits(plan: ModePlan, request: Request) -> bool:
    on_disk = request.disk_gb is None or plan.disk <= request.disk_gb * GB
    return plan.missing is None and plan.needed <= request.memory_bytes and on_disk


def _largest_that_fits(of: Callable[[int, int], ModePlan], layers: int, request: Request) -> int | None:
    smallest = request.micro_batches()[-1]
    return next((size for size in reversed(_block_sizes(layers)) if _fits(of(size, smallest), request)), None)


def _block_sizes(layers: int) -> list[int]:
    """One size for every number of blocks, the most even one."""
    return sorted({-(-layers // blocks) for blocks in range(1, layers + 1)})


def _at_most(shape: ModelShape, gpus: int) -> int:
    """Layers of a block, so that every GPU has one."""
    layers = len(shape.linear_layers)
    return next((size for size in reversed(_block_sizes(layers)) if -(-layers // size) >= gpus), 1)


def _weights(shape: ModelShape) -> float:
    return shape.parameters * Step(1, 1).element

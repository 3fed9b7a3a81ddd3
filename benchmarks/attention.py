"""`lolcats bench attention`, for the measurements of docs/performance.md.

    python benchmarks/attention.py --json benchmarks/results/attention_h200.json
    python benchmarks/attention.py --shapes 1x1024,8x4096 --modes forward,train --implementations triton,sdpa_cudnn
    python benchmarks/attention.py --shapes 8x4096 --modes train --profile

Calls are replayed CUDA graphs over rotating inputs, so that they show the kernels; `--no-capture` times them with the
host's launches.
"""

from lolcats.bench import attention
from lolcats.bench.command import measure

if __name__ == "__main__":
    measure(attention, attention.AttentionBench())

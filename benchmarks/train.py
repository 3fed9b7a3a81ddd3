"""`lolcats bench train`, for the measurements of docs/performance.md.

python benchmarks/train.py --model llama3-8b --micro-batches 4,8 --json benchmarks/results/train_h200.json
python benchmarks/train.py --model smollm2-135m --rows transfer --profile
python benchmarks/train.py --model smollm2-135m --sinks 1 --train-feature-maps --position-offset 7168
"""

from lolcats.bench import train
from lolcats.bench.command import measure

if __name__ == "__main__":
    measure(train, train.TrainBench())

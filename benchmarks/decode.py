"""`lolcats bench decode`, for the measurements of docs/performance.md.

python benchmarks/decode.py --model llama3-8b --json benchmarks/results/decode_h200.json
python benchmarks/decode.py --batches 512 --profile
python benchmarks/decode.py --sections throughput --batches 512 --full-run-batch 512 --seconds 400
python benchmarks/decode.py --model smollm2-135m --sections prefill,latency --sparse-cache 128
"""

from lolcats.bench import decode
from lolcats.bench.command import measure

if __name__ == "__main__":
    measure(decode, decode.DecodeBench())

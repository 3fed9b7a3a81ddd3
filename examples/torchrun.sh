#!/usr/bin/env bash
# Linearize a model on all GPUs of one or more machines; it resumes by itself when a process or a machine is lost.
#
#   MODEL=meta-llama/Llama-3.1-70B OUTPUT=/shared/out ./examples/torchrun.sh --recipe llama-3.1-70b
#
# On several machines run it on each, with the same NODES, HEAD (the name of one of them) and RUN_ID. OUTPUT must be
# on a file system that all of them share. Further arguments go to `lolcats linearize`.
set -euo pipefail

: "${OUTPUT:?folder for the linearized model, shared by all machines}"
NODES="${NODES:-1}"
HEAD="${HEAD:-localhost}"
PORT="${PORT:-29500}"
RUN_ID="${RUN_ID:-lolcats}"
# Processes of this machine: one per GPU.
PROCESSES="${PROCESSES:-gpu}"
# Restarts after a lost process; each resumes from the last checkpoint.
RESTARTS="${RESTARTS:-3}"

arguments=(--output "$OUTPUT" --resume "$@")
if [[ -n "${MODEL:-}" ]]; then
  arguments=("$MODEL" "${arguments[@]}")
fi

# --resume begins a run where there is none yet, so that first starts and restarts are the same command.
exec torchrun \
  --nnodes "$NODES" \
  --nproc-per-node "$PROCESSES" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD:$PORT" \
  --rdzv-id "$RUN_ID" \
  --max-restarts "$RESTARTS" \
  -m lolcats linearize "${arguments[@]}"

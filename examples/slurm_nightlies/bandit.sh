#!/usr/bin/env bash
# shellcheck disable=SC2034
# The policy finds the best arm, over two jobs of which the second goes on from the first one's checkpoint.
# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=0
STEPS_PER_RUN=100
MAX_STEPS=200
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))
NUM_MINUTES=5
# ===== END CONFIG =====
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python train.py --checkpoints "$CKPT_DIR" --logs "$LOG_DIR" --steps "$STEPS_PER_RUN" "$@"
rlcanary dump-logs "$LOG_DIR" "$JSON_METRICS"
if (( $(jq '.reward | length' "$JSON_METRICS") >= MAX_STEPS )); then
  rlcanary check-metrics "$JSON_METRICS" 'mean(data["reward"], last=50) > 0.8'
fi

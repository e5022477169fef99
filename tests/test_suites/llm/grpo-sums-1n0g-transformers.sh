#!/usr/bin/env bash
# shellcheck disable=SC2034
# GRPO on transformers learns sums of two digits, over two jobs of which the second goes on from the first one's checkpoint.
# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=0
STEPS_PER_RUN=150
MAX_STEPS=300
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))
NUM_MINUTES=30
# ===== END CONFIG =====
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/../../run_environment.sh"

train_next_steps "$STEPS_PER_RUN" "$MAX_STEPS" "$@"
rlcanary check-metrics "$JSON_METRICS" \
  'mean(data["reward"], 0, 10) < 0.05' \
  'mean(data["reward"], last=10) > 0.3' \
  'max(data["mult_prob_error"]) < 1.001' \
  'median(data["seconds/sample"], last=50) < 5'

#!/usr/bin/env bash
# shellcheck disable=SC2034
# GRPO with vLLM on the CPU: twenty weight syncs, after each of which the engine agrees with the trainer on every token.
# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=0
STEPS_PER_RUN=20
MAX_STEPS=20
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))
NUM_MINUTES=20
# ===== END CONFIG =====
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/../../run_environment.sh"

train_next_steps "$STEPS_PER_RUN" "$MAX_STEPS" "$@"
rlcanary check-metrics "$JSON_METRICS" \
  'max(data["mult_prob_error"]) < 1.01' \
  'max(data["failed_requests"]) == 0' \
  'data["policy_version"]["19"] == 20'

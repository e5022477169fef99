#!/usr/bin/env bash
# GRPO with vLLM as the sampler: weights reach the engine after every step, and it agrees with the trainer on every token.
# Needs vLLM, on the CPU here; about a minute, most of it the engine's start. Arguments go to `rlcanary train`.
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/../run_environment.sh"

rlcanary train tests/functional/grpo.yaml --set run.folder="$LOG_DIR" --set run.steps=5 \
  --set roles.sampler.engine=vllm "$@"
rlcanary dump-logs "$LOG_DIR" "$JSON_METRICS"
rlcanary check-metrics "$JSON_METRICS" \
  'max(data["mult_prob_error"]) < 1.01' \
  'max(data["failed_requests"]) == 0' \
  'max(data["grad_norm"]) < 100' \
  'data["policy_version"]["4"] == 5'

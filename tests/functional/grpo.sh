#!/usr/bin/env bash
# GRPO on transformers: a tiny model from scratch begins to learn sums, and trainer and sampler agree on every token.
# Needs no GPU; about half a minute. Arguments go to `rlcanary train`.
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/../run_environment.sh"

rlcanary train tests/functional/grpo.yaml --set run.folder="$LOG_DIR" "$@"
rlcanary dump-logs "$LOG_DIR" "$JSON_METRICS"
rlcanary check-metrics "$JSON_METRICS" \
  'mean(data["reward"], 0, 5) < 0.1' \
  'mean(data["reward"], last=5) > 0.2' \
  'max(data["mult_prob_error"]) < 1.001' \
  'max(data["grad_norm"]) < 100' \
  'min(data["entropy"]) > 0'

#!/usr/bin/env bash
# Evaluation: a model that was taught the answers is loaded from its folder and tried on them before the first update.
# Needs no GPU; under half a minute.
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/../run_environment.sh"

"$PYTHON" tests/functional/sft.py tests/functional/grpo.yaml "$LOG_DIR" "$CKPT_DIR/model" 100
rlcanary train tests/functional/grpo.yaml --set run.folder="$EXP_DIR/eval" --set run.steps=1 \
  --set "model={path: '$CKPT_DIR/model'}" \
  --set "evaluation={datasets: [{name: arithmetic, count: 16, largest: 3}]}"
rlcanary dump-logs "$EXP_DIR/eval" "$JSON_METRICS"
rlcanary check-metrics "$JSON_METRICS" \
  'data["evaluation/reward"]["0"] > 0.9' \
  'data["evaluation/failed"]["0"] == 0' \
  'max(data["truncated"]) < 0.1' \
  'max(data["mult_prob_error"]) < 1.001'

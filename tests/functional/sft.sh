#!/usr/bin/env bash
# Supervised fine-tuning: the trainer's model, data and batches under the reference's logprobs learn the answers by heart.
# Needs no GPU; some seconds.
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/../run_environment.sh"

"$PYTHON" tests/functional/sft.py tests/functional/grpo.yaml "$LOG_DIR" "$CKPT_DIR/model" 100
rlcanary dump-logs "$LOG_DIR" "$JSON_METRICS"
rlcanary check-metrics "$JSON_METRICS" \
  '2 < data["loss"]["0"] < 4' \
  'data["loss"]["99"] < 0.05' \
  'data["answer_probability"]["99"] > 0.9' \
  'max(data["grad_norm"]) < 100'

# shellcheck shell=bash
# Sourced by the functional tests and the test suites: the root of the code as current folder, `rlcanary` on the PATH, and the
# folders that a launch names. A script that is typed by hand gets a temporary folder, which goes when it ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v rlcanary >/dev/null || PATH="$PWD/.venv/bin:$PATH"
command -v rlcanary >/dev/null || {
  echo "$0: rlcanary is not installed here: activate the environment that has it, or run 'make venv'" >&2
  exit 2
}
PYTHON=${PYTHON:-$(dirname "$(command -v rlcanary)")/python}
export PYTHON
if [[ -z ${EXP_DIR:-} ]]; then
  EXP_DIR=$(mktemp -d "${TMPDIR:-/tmp}/rlcanary-run-XXXXXX")
  trap 'rm -rf "$EXP_DIR"' EXIT
fi
export EXP_DIR
export CKPT_DIR=${CKPT_DIR:-$EXP_DIR/checkpoints}
export LOG_DIR=${LOG_DIR:-$EXP_DIR/logs}
export JSON_METRICS=${JSON_METRICS:-$EXP_DIR/metrics.json}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$CKPT_DIR" "$LOG_DIR"

# train_next_steps STEPS_PER_RUN MAX_STEPS [ARGUMENTS]: the next steps of the script's plan, from the newest checkpoint on.
# Ends the script, with success, where the last step was not reached: the next job goes on. CKPT_DIR is the run's folder.
train_next_steps() {
  local per_run=$1 last=$2 plan steps newest goes_on=()
  plan=tests/test_suites/llm/plans/$(basename "$0" .sh).yaml
  steps=$per_run
  newest=$(find "$CKPT_DIR" -name 'step-*.pt' | sort | tail -n 1)
  if [[ -n $newest ]]; then
    newest=${newest##*step-}
    steps=$((10#${newest%.pt} + per_run))
    goes_on=(--resume)
  fi
  if ((steps > last)); then steps=$last; fi
  rlcanary train "$plan" --set run.folder="$CKPT_DIR" --set run.steps="$steps" \
    --set run.checkpoint_every="$per_run" "${goes_on[@]}" "${@:3}"
  rlcanary dump-logs "$CKPT_DIR" "$JSON_METRICS"
  if ((steps < last)); then
    echo "$steps of $last steps are done"
    exit 0
  fi
}

#!/usr/bin/env bash
# Run the unit tests. All arguments go to pytest: --hf-gated, --nightly, a team's --…-only, -k, paths.
#
#   PYTHON=/path/to/python   the interpreter (default: that of the active environment, then .venv, then python3)
#   TESTS=tests/unit         what to run
#   GPUS_REQUIRED=2          refuse to start with fewer visible GPUs (default: 0)
#
# A run that collects no tests counts as success, so that a flag may leave nothing to run.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
NO_TESTS_COLLECTED=5

refuse() {
  echo "run_unit.sh: $*" >&2
  exit 2
}

find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    echo "$PYTHON"
  elif [[ -n "${VIRTUAL_ENV:-}" ]]; then
    echo "$VIRTUAL_ENV/bin/python"
  elif [[ -x .venv/bin/python ]]; then
    echo "$PWD/.venv/bin/python"
  else
    echo python3
  fi
}

python=$(find_python)
"$python" -c 'import pytest, pytest_rlcanary' 2>/dev/null ||
  refuse "$python has no pytest with rlcanary; activate the environment or set PYTHON"

required=${GPUS_REQUIRED:-0}
[[ "$required" =~ ^[0-9]+$ ]] || refuse "GPUS_REQUIRED must be a number, got '$required'"
if ((required > 0)); then
  visible=$("$python" -c 'from rlcanary.gates import Machine; print(Machine.here().gpus)')
  ((visible >= required)) || refuse "$required GPUs are required, $visible are visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"
fi

code=0
"$python" -m pytest "${TESTS:-tests/unit}" "$@" || code=$?
if ((code == NO_TESTS_COLLECTED)); then
  echo "run_unit.sh: no tests collected, which counts as success"
  exit 0
fi
exit "$code"

#!/usr/bin/env bash
# Judge a nightly on one commit: GOOD=… BAD=… tools/bisect-run.sh tools/launch-bisect.sh "$TEST_CASE"
# Checks the requirements before the first job; tools/launch-bisect-helper.sh does the rest. See docs/nightlies.md.
#
#   EXECUTOR        slurm, ray or local (default: slurm where there is sbatch)
#   REQUIRED        variables that must be set (default on Slurm: those below; elsewhere none)
set -euo pipefail

# Exit code 128 ends a `git bisect run`; `rlcanary bisect` reads the file.
abort() {
  echo "launch-bisect.sh: $1" >&2
  if [[ -n ${RLCANARY_BISECT_VERDICT:-} ]]; then
    printf '{"outcome": "abort", "reason": "%s"}\n' "$1" >"$RLCANARY_BISECT_VERDICT.tmp"
    mv "$RLCANARY_BISECT_VERDICT.tmp" "$RLCANARY_BISECT_VERDICT"
  fi
  exit 128
}

[[ $# == 1 ]] || abort "name one test script, as in tools/launch-bisect.sh tests/test_suites/llm/grpo-sums-1n0g-transformers.sh"

executor=${EXECUTOR:-auto}
if [[ $executor == auto ]]; then
  executor=local
  if command -v sbatch >/dev/null; then executor=slurm; fi
fi
if [[ $executor == slurm ]]; then
  required=${REQUIRED-HF_HOME HF_DATASETS_CACHE ACCOUNT PARTITION ${CONTAINER:+MOUNTS}}
else
  required=${REQUIRED-}
fi
missing=()
for name in $required; do
  [[ -n ${!name:-} ]] || missing+=("$name")
done
((${#missing[@]} == 0)) || abort "set ${missing[*]} before the start, or name in REQUIRED what is needed here"

helper="$(dirname "${BASH_SOURCE[0]}")/launch-bisect-helper.sh"
[[ -f $helper ]] || abort "launch-bisect-helper.sh has to lie beside launch-bisect.sh: start with tools/bisect-run.sh, or pin it"
EXECUTOR=$executor exec bash "$helper" "$1"

#!/usr/bin/env bash
# Run a functional test in a container: CONTAINER=image tests/run_functional_in_docker.sh functional/sft.sh [arguments]
#
# The script is given relative to tests/ or to the root of the repository. The settings are those of run_unit_in_docker.sh.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
script=${1:-}
[[ -n "$script" ]] || {
  echo "${0##*/}: name the script to run, as in CONTAINER=my/image:tag $0 functional/sft.sh" >&2
  exit 2
}
shift
[[ -f "$script" ]] || script=tests/$script
[[ -f "$script" ]] || {
  echo "${0##*/}: neither ${script#tests/} nor $script is a file" >&2
  exit 2
}
SCRIPT="$script" exec tests/run_unit_in_docker.sh "$@"

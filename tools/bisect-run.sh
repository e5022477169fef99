#!/usr/bin/env bash
# Find the commit that broke a command: GOOD=<ref> BAD=<ref> tools/bisect-run.sh [OPTIONS] CMD…
# A wrapper of `rlcanary bisect` with the same options; docs/bisect.md explains the variables.
set -euo pipefail

is_on() {
  case "${1:-}" in '' | 0 | false | no) return 1 ;; esac
}

arguments=()
[[ -n ${GOOD:-} ]] && arguments+=("--good=$GOOD")
[[ -n ${BAD:-} ]] && arguments+=("--bad=$BAD")
[[ -n ${BISECT_SAVE_DIR:-} ]] && arguments+=("--save-dir=$BISECT_SAVE_DIR")
[[ -n ${BISECT_REPLAY_LOG:-} ]] && arguments+=("--replay=$BISECT_REPLAY_LOG")
is_on "${SKIP_GOOD_CHECK:-}" && arguments+=(--skip-good-check)
is_on "${BISECT_NO_RESET:-}" && arguments+=(--keep-worktree)

# Options of bisect may come before the command; a command is never read as a subcommand.
[[ ${1:-} == -* ]] || arguments+=(--)

# The helper that launch-bisect.sh runs must stay the same too, if it is part of the history.
for word in "$@"; do
  [[ $word == *launch-bisect.sh && -f ${word%.sh}-helper.sh ]] || continue
  place=$(cd "$(dirname "$word")" && git rev-parse --show-toplevel 2>/dev/null) || continue
  [[ $place != "$(git rev-parse --show-toplevel)" ]] || arguments=("--pin=${word%.sh}-helper.sh" ${arguments[@]+"${arguments[@]}"})
done

if command -v rlcanary >/dev/null; then
  canary=(rlcanary)
elif python3 -c 'import rlcanary' 2>/dev/null; then
  canary=(python3 -m rlcanary)
else
  echo "bisect-run.sh: rlcanary is not installed here: run 'pip install rlcanary', or activate the environment that has it" >&2
  exit 2
fi

export RLCANARY_BISECT_DRIVER="$0"
exec "${canary[@]}" bisect ${arguments[@]+"${arguments[@]}"} "$@"

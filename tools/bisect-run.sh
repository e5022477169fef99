#!/usr/bin/env bash
# Finds the commit that broke a command: GOOD=<ref> BAD=<ref> tools/bisect-run.sh [OPTIONS] CMD…
# A thin front of `rlcanary bisect`, whose options it takes; docs/bisect.md says what the variables mean.
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

# Options of ours may come before the command; a command is never taken for a subcommand.
[[ ${1:-} == -* ]] || arguments+=(--)

# What launch-bisect.sh runs has to stay the same as well, where it is part of the history.
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

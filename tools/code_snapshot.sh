#!/usr/bin/env bash
# Copy the files that git tracks, submodules too, to a folder named for their content: tools/code_snapshot.sh [NAME]
# A wrapper of `rlcanary code-snapshot`, which prints the path of the copy.
set -euo pipefail

if command -v rlcanary >/dev/null; then
  exec rlcanary code-snapshot "$@"
elif python3 -c 'import rlcanary' 2>/dev/null; then
  exec python3 -m rlcanary code-snapshot "$@"
fi
echo "code_snapshot.sh: rlcanary is not installed here: run 'pip install rlcanary', or activate the environment that has it" >&2
exit 2

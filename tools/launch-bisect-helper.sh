#!/usr/bin/env bash
# Judge the commit that is checked out here: launch the test script on a snapshot of it, with its own checkpoints, wait
# until its metrics are judged, and exit with the code of `rlcanary launch`.
set -euo pipefail

# The jobs import the commit; the launcher is the same on every commit.
export LAUNCH_PYTHONPATH=${PYTHONPATH:-}
unset PYTHONPATH DRYRUN
exec env WATCH=1 rlcanary launch "$1"

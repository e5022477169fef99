#!/usr/bin/env bash
# Judges one commit, the one that is checked out here: launches the test script on a snapshot of it, with checkpoints of
# its own, waits until its metrics are judged, and ends with the exit code of `rlcanary launch`.
set -euo pipefail

# The jobs import the commit; what launches them is the same on every commit.
export LAUNCH_PYTHONPATH=${PYTHONPATH:-}
unset PYTHONPATH DRYRUN
exec env WATCH=1 rlcanary launch "$1"

"""Find the commit that broke a command, in worktrees of its own: `rlcanary bisect` and `tools/bisect-run.sh`."""

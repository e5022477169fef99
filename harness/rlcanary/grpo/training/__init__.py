"""The optimizer step, checkpoints and the log of a run."""

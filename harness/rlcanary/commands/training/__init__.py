"""Train, and judge an update of a run."""

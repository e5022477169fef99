"""verl's own trainer, workers and agent loops on one CPU."""

"""The posterior over commits and the choice of the next run."""

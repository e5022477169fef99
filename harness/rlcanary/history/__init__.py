"""Results files of all runs, read back: trends, change points, regressions."""

"""Read back the results files of all runs: trends, change points, regressions."""

"""Recording what a test run measures, as it happens."""

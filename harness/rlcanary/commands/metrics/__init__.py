"""Follow the metrics of tests and runs."""

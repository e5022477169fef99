"""Check the metrics of one training run: sources, windows, expressions."""

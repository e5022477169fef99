"""The numbers of one training run: sources, windows, expressions."""

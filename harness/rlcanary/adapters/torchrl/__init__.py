"""The adapter of torchrl."""

"""The adapter of verl."""

"""The `tracker` fixture and the results file."""

"""torchrl behind the adapter contract."""

"""The adapter of prime-rl."""

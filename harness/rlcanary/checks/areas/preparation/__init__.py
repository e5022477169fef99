"""Checks of what a run starts from: verifiers, prepared datasets and settings."""

"""Verifiers: what a completion is worth, and whether that could be found out at all."""

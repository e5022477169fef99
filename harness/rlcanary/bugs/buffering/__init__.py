"""Bugs between sampler and trainer."""

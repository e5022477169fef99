"""Checks of what lies between sampler and trainer."""

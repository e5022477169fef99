"""Datasets and the items that a rollout draws."""

"""Batches of rollouts."""

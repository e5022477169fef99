"""Bugs in rollouts, rewards and the engine."""

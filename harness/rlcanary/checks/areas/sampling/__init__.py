"""Checks of rollouts, rewards, the engine and its weights."""

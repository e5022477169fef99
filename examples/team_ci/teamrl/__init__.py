"""A team's RL code."""

"""Bugs in credit per token and in the critic."""

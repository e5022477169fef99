"""Bugs in the update and in evaluation."""

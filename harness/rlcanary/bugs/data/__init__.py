"""Bugs in batches, their order and what prompts become."""

"""Bugs in batches, data order and rendering of prompts."""

"""Bugs in logprobs, forward passes and masks."""

"""Checks of logprobs, entropies, forward passes and masks."""

"""Bugs in advantages, the loss and how it is split."""

"""Bugs in advantages, the loss and its split into pieces."""

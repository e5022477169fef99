"""Checks of advantages, the loss, its terms and its split into pieces."""

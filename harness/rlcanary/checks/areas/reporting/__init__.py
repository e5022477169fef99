"""Checks of the numbers and samples that people look at."""

"""Bugs in the numbers and samples that people look at."""

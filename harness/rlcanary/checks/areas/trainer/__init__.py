"""Checks of the update, its metrics and evaluation."""

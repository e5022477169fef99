"""Checks of what lies on several ranks: rows, updates, vocabularies."""

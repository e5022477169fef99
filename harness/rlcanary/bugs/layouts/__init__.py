"""Bugs in what lies on several ranks: rows, updates, vocabularies."""

"""The journal of a search, and git's own bisect log."""

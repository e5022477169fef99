"""Check training code, and what the checks catch."""

"""The metric sources, a module each, found from this folder."""

"""Tools that completions may call."""

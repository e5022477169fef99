"""Turn prompts into scored groups of completions."""

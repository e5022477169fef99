"""From prompts to scored groups of completions."""

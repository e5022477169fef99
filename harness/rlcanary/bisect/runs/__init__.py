"""The runs of a search: a worktree each, its environment, and what it prints."""

"""Lines of commits: the first parents between GOOD and BAD, and the branches inside merges."""

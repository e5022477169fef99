"""The line of commits between GOOD and BAD, and the lines inside merges."""

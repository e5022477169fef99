"""Credit per token, and the critic."""

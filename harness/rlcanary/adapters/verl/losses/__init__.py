"""verl's scoring and losses, and their options."""

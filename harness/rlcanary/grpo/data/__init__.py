"""Load datasets and deal out the items that a rollout draws."""

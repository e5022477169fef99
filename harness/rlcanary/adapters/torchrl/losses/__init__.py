"""torchrl's losses."""

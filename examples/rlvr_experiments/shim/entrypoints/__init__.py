"""The entry points whose functions the unit tests call."""

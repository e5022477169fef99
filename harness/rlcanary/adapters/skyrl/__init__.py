"""The adapter of SkyRL."""

"""Checks of batches, data order, filters and rendering of prompts."""

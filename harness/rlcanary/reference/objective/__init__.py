"""Advantages, credit and losses."""

"""Checks of the start of a run: the state that it trains, and its plan."""

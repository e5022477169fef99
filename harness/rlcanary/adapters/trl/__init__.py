"""The adapter of TRL."""

from rlcanary.adapters.trl.adapter import TrlAdapter
from rlcanary.adapters.trl.conventions import conventions_of

__all__ = ["TrlAdapter", "conventions_of"]

"""The adapter of the bundled trainer."""

from rlcanary.adapters.grpo.adapter import GrpoAdapter

__all__ = ["GrpoAdapter"]

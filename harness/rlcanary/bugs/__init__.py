"""The museum: silent bugs that shipped, each planted in the reference by one small mutation."""

from rlcanary.bugs.museum import Bug, all_bugs

__all__ = ["Bug", "all_bugs"]

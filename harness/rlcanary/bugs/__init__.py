"""The museum: silent bugs that shipped, each planted in the reference by one small mutation."""

from rlcanary.bugs.museum import OUT_OF_REACH, Bug, all_bugs

__all__ = ["OUT_OF_REACH", "Bug", "all_bugs"]

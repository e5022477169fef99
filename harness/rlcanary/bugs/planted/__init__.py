"""The museum's bugs planted in the installed code of frameworks, by undoing there what the fix changed."""

from rlcanary.bugs.planted.plant import FRAMEWORKS, Change, Framework, Plant, framework_of

__all__ = ["FRAMEWORKS", "Change", "Framework", "Plant", "framework_of"]

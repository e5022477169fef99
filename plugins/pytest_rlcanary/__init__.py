"""The pytest plugins of rlcanary. Each module is one entry point, so `-p no:rlcanary-tracker` switches one off.

pytest would rewrite the asserts of all modules of a distribution that has plugins, which takes several times as long as to
import them, at every start. No test asserts anything in them, so they are found before pytest looks.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class AsWritten:
    """Finds the modules of rlcanary and of its plugins for `import`, without pytest's rewriting."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ("rlcanary", "pytest_rlcanary"):
            return PathFinder.find_spec(fullname, path, target)
        return None


sys.meta_path.insert(0, AsWritten)

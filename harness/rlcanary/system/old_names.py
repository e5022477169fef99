"""Modules under their names from release 0.1, with a warning that gives the new name."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD_NAMES = {
    "rlcanary.adapters.base": "rlcanary.contract.adapter",
    "rlcanary.batch": "rlcanary.contract.batch",
    "rlcanary.conventions": "rlcanary.contract.presets",
    "rlcanary.engine": "rlcanary.contract.engine",
    "rlcanary.grpo.batching": "rlcanary.grpo.engines.batching",
    "rlcanary.grpo.chat": "rlcanary.grpo.rollout.chat",
    "rlcanary.grpo.collector": "rlcanary.grpo.rollout.collector",
    "rlcanary.grpo.containers": "rlcanary.grpo.engines.containers",
    "rlcanary.grpo.datasets": "rlcanary.grpo.data.datasets",
    "rlcanary.grpo.environment": "rlcanary.grpo.rollout.environment",
    "rlcanary.grpo.items": "rlcanary.grpo.data.items",
    "rlcanary.grpo.python_tool": "rlcanary.grpo.tools.python_tool",
    "rlcanary.grpo.transformers_policy": "rlcanary.grpo.engines.transformers_policy",
}
"""Documented modules of release 0.1 that moved. The old names end with release 0.3."""


class OldNames(MetaPathFinder):
    """Finds a module under its old name. It comes last on `sys.meta_path`, so existing modules pay nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in OLD_NAMES:
            return None
        return ModuleSpec(fullname, _Alias(OLD_NAMES[fullname]))


class _Alias(Loader):
    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # FutureWarning, because Python hides a DeprecationWarning from all but __main__.
        warnings.warn(f"{spec.name} is now {self.new_name}; the old name goes away in 0.3", FutureWarning, stacklevel=2)
        module = importlib.import_module(self.new_name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # The import system has just set the spec of the old name.
        sys.modules.setdefault(self.new_name, module)

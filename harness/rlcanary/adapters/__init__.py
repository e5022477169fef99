"""Adapters: one module or package per codebase."""

from rlcanary.adapters.load import BUNDLED, load_adapter
from rlcanary.contract.adapter import CAPABILITIES, Adapter, NotProvided, provided

__all__ = ["BUNDLED", "CAPABILITIES", "Adapter", "NotProvided", "load_adapter", "provided"]

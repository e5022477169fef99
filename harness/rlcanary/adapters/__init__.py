"""Adapters: one module per codebase, and the base class for yours."""

from rlcanary.adapters.base import CAPABILITIES, Adapter, NotProvided, provided
from rlcanary.adapters.load import BUNDLED, load_adapter

__all__ = ["BUNDLED", "CAPABILITIES", "Adapter", "NotProvided", "load_adapter", "provided"]

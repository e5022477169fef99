"""The base class of adapters; see `rlcanary.contract`."""

from rlcanary.contract import CAPABILITIES, Adapter, NotProvided, provided

__all__ = ["CAPABILITIES", "Adapter", "NotProvided", "provided"]

"""The base class of adapters; see `rlcanary.contract.adapter`."""

from rlcanary.contract.adapter import CAPABILITIES, Adapter, NotProvided, provided

__all__ = ["CAPABILITIES", "Adapter", "NotProvided", "provided"]

"""Audit a training run while it runs: is the update that is taken the one that was declared?

The names below are imported when one is used, because they import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcanary.live.audit import Audit
    from rlcanary.live.findings import Finding, Stopped
    from rlcanary.live.hooks.torchrl import torchrl
    from rlcanary.live.hooks.trl import trl
    from rlcanary.live.replay import replayed
    from rlcanary.live.syncs import probe_logprobs

__all__ = ["Audit", "Finding", "Stopped", "probe_logprobs", "replayed", "torchrl", "trl"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    modules = {
        "Audit": "audit",
        "Stopped": "findings",
        "Finding": "findings",
        "torchrl": "hooks.torchrl",
        "trl": "hooks.trl",
        "probe_logprobs": "syncs",
        "replayed": "replay",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)

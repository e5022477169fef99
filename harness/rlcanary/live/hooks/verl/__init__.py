"""The audit in verl's workers and its trainer: verl imports this module in each process. Written for verl 0.9.

    VERL_USE_EXTERNAL_MODULES=rlcanary.live.hooks.verl

Settings are those of `hooks.environment`.
"""

from rlcanary.live.hooks.fitting import installed

WRITTEN_FOR = "0.9"

installed("verl", WRITTEN_FOR, f"{__name__}.workers")

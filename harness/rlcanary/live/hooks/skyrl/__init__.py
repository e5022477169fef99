"""The audit in SkyRL's trainer and its policy workers. Written for SkyRL 0.3.

    import rlcanary.live.hooks.skyrl  # in the script that starts the run, before SkyRL starts Ray

Settings are those of `hooks.environment`.
"""

from rlcanary.live.hooks.fitting import installed

WRITTEN_FOR = "0.3"

installed("skyrl", WRITTEN_FOR, f"{__name__}.workers")

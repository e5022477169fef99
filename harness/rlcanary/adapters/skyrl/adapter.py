"""SkyRL as an adapter: its trainer's and its workers' own methods, a module per group of capabilities."""

from __future__ import annotations

from rlcanary.adapters.skyrl.reporting import Reporting
from rlcanary.adapters.skyrl.rollouts import Rollouts
from rlcanary.adapters.skyrl.scoring import Scoring
from rlcanary.adapters.skyrl.training import Training
from rlcanary.adapters.skyrl.verifying import Verifying


class SkyrlAdapter(Scoring, Training, Rollouts, Verifying, Reporting):
    """Adapter of SkyRL under some settings, by default its own."""

    name = "skyrl"

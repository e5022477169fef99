"""SkyRL as an adapter: its trainer's and its workers' own methods, a module per group of capabilities."""

from __future__ import annotations

from rlcanary.adapters.skyrl.reporting import Reporting
from rlcanary.adapters.skyrl.scoring import Scoring
from rlcanary.adapters.skyrl.training import Training


class SkyrlAdapter(Scoring, Training, Reporting):
    """Adapter of SkyRL under some settings, by default its own."""

    name = "skyrl"

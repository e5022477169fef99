"""NeMo RL as an adapter: its losses, its estimator and its policy worker, a module per group of capabilities."""

from __future__ import annotations

from rlcanary.adapters.nemo_rl.other_losses import OtherLosses
from rlcanary.adapters.nemo_rl.training import Training


class NemoRlAdapter(Training, OtherLosses):
    """Adapter of NeMo RL under some settings, by default its own."""

    name = "nemo_rl"

"""TRL's trainers as an adapter: real trainers on tiny models, whose own methods are called. Written for TRL 1.16."""

from __future__ import annotations

from rlcanary.adapters.trl.conversations import TrlConversations
from rlcanary.adapters.trl.data import TrlData
from rlcanary.adapters.trl.layouts import TrlLayouts
from rlcanary.adapters.trl.losses import TrlLosses
from rlcanary.adapters.trl.objective import TrlObjective
from rlcanary.adapters.trl.preparation import TrlPreparation
from rlcanary.adapters.trl.reporting import TrlReporting
from rlcanary.adapters.trl.sampling import TrlSampling
from rlcanary.adapters.trl.training import TrlTraining


class TrlAdapter(
    TrlObjective,
    TrlTraining,
    TrlData,
    TrlSampling,
    TrlConversations,
    TrlLosses,
    TrlReporting,
    TrlPreparation,
    TrlLayouts,
):
    """Adapter of TRL's trainers under some `GRPOConfig` settings, by default TRL's."""

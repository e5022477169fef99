"""OpenRLHF as an adapter: its trainers' and workers' own methods, a module per group of capabilities."""

from __future__ import annotations

from rlcanary.adapters.openrlhf.credit import CreditOfTokens
from rlcanary.adapters.openrlhf.data import Data
from rlcanary.adapters.openrlhf.objective import Objective
from rlcanary.adapters.openrlhf.other_losses import OtherLosses
from rlcanary.adapters.openrlhf.training import Training


class OpenrlhfAdapter(Objective, CreditOfTokens, Training, Data, OtherLosses):
    """Adapter of OpenRLHF under some settings, by default its own with the advantage estimator `group_norm`."""

    name = "openrlhf"

"""torchrl as an adapter: its own functions, a module per group of capabilities. Written for torchrl 0.14."""

from __future__ import annotations

from collections.abc import Mapping

from rlcanary.adapters.algorithms import algorithms_of
from rlcanary.adapters.torchrl.conversations import Conversations
from rlcanary.adapters.torchrl.evaluating import Evaluating
from rlcanary.adapters.torchrl.losses.critic import Critic
from rlcanary.adapters.torchrl.losses.other_losses import Supervised
from rlcanary.adapters.torchrl.rendering import Rendering
from rlcanary.adapters.torchrl.rollouts import Rollouts
from rlcanary.adapters.torchrl.sampler import Sampler
from rlcanary.adapters.torchrl.scoring import Scoring
from rlcanary.adapters.torchrl.syncing import Syncing
from rlcanary.adapters.torchrl.updates import Updates
from rlcanary.adapters.torchrl.verifying import Verifying
from rlcanary.contract.adapter import Adapter


class TorchrlAdapter(
    Scoring, Updates, Critic, Supervised, Rendering, Rollouts, Sampler, Conversations, Syncing, Verifying, Evaluating
):
    """Adapter of torchrl under some settings, by default its own."""

    name = "torchrl"

    def configurations(self) -> Mapping[str, Adapter]:
        """Return the algorithms that settings choose, and a KL in the loss."""
        return {**algorithms_of(self), "kl": self.configured(kl_coef=0.05)}

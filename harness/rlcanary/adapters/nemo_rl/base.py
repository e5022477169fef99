"""NeMo RL under some settings. Written for NeMo RL of May to August 2026."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from rlcanary.adapters.frameworks import has_part, part, takes, usable
from rlcanary.adapters.nemo_rl.options import ADVANTAGE, POLICY, WITHOUT_WORDS, Entries, conventions_of, settings_for
from rlcanary.adapters.nemo_rl.worker import importing
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.errors import UserError


class NemoRlBase(Adapter):
    """The settings, and the configurations of NeMo RL that they make."""

    def __init__(
        self,
        loss: Mapping[str, Any] | None = None,
        advantage: Mapping[str, Any] | None = None,
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up the adapter with settings of NeMo RL's configuration classes.

        Args:
            loss: fields of `ClippedPGLossConfig`.
            advantage: fields of `AdvEstimatorConfig` for its estimator `grpo`.
            policy: `max_grad_norm` of the policy, 1.0 as in NeMo RL's examples; the `temperature` of its generation; the
                `mini_batches` of a rollout batch; `overlong_buffer_length` and `overlong_buffer_penalty` of its
                `RewardShapingConfig`.

        Raises:
            UserError: NeMo RL is not installed, this tree of it has no such option, or the conventions cannot express it.
        """
        self.loss = dict(loss or {})
        self.advantage = dict(advantage or {})
        self.policy = {**POLICY, **(policy or {})}
        install = "run this in the environment in which NeMo RL trains, with rlcanary installed there"
        with (
            usable("nemo_rl", install, "NeMo RL of May to August 2026"),
            importing(),
        ):
            import nemo_rl.algorithms.advantage_estimator
            import nemo_rl.algorithms.loss  # noqa: F401
            from nemo_rl.algorithms.utils import calculate_kl

            # Before June 2026 the KL of the loss was without the score-function part.
            has_score_term = takes(calculate_kl, "importance_sampling_weights")
            # Configurations of the loss were dictionaries in older trees.
            self.conventions = conventions_of(self.loss_config, self.advantage_config, self.policy, has_score_term)
        if later := self._later(self.loss):
            raise UserError(f"the loss of this tree of NeMo RL has no option {later}")
        unknown = [name for name in WITHOUT_WORDS if self.loss.get(name)]
        if self.loss_config.truncated_importance_sampling_type == "seq-mask-tis":
            unknown.append("truncated_importance_sampling_type='seq-mask-tis'")
        if unknown:
            raise UserError(f"the conventions cannot express {', '.join(unknown)}")

    def configured(self, **changes: Any) -> Self:
        loss, advantage, policy = settings_for(self.loss, self.advantage, self.policy, self.conventions, changes)
        if later := self._later(loss):
            raise NotProvided(f"the loss of this tree has no option {later}")
        return type(self)(loss, advantage, policy)

    def _later(self, loss: Mapping[str, Any]) -> str:
        """Name the options that this tree does not know: its class takes any name, and ignores those."""
        known = type(self.loss_config).model_fields
        return ", ".join(name for name, value in loss.items() if value and name not in known)

    @cached_property
    def loss_config(self) -> Any:
        """NeMo RL's `ClippedPGLossConfig`."""
        from nemo_rl.algorithms.loss import ClippedPGLossConfig

        return ClippedPGLossConfig(**self.loss)

    @cached_property
    def advantage_config(self) -> Any:
        """NeMo RL's `AdvEstimatorConfig`, which was a dictionary in older trees."""
        place = "nemo_rl.algorithms.advantage_estimator:AdvEstimatorConfig"
        return part(place)(**self.advantage) if has_part(place) else Entries({**ADVANTAGE, **self.advantage})

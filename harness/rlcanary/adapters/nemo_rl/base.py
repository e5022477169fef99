"""NeMo RL under some settings. Written for NeMo RL of August 2026."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from rlcanary.adapters.frameworks import usable
from rlcanary.adapters.nemo_rl.options import POLICY, WITHOUT_WORDS, conventions_of, settings_for
from rlcanary.adapters.nemo_rl.worker import importing
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions
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
            UserError: NeMo RL is not installed, or the conventions cannot express a setting.
        """
        self.loss = dict(loss or {})
        self.advantage = dict(advantage or {})
        self.policy = {**POLICY, **(policy or {})}
        install = "run this in the environment in which NeMo RL trains, with rlcanary installed there"
        with (
            usable("nemo_rl", install, "NeMo RL of August 2026"),
            importing(),
        ):
            import nemo_rl.algorithms.advantage_estimator
            import nemo_rl.algorithms.loss  # noqa: F401

            # Configurations were dictionaries in older trees.
            conventions_of(self.loss_config, self.advantage_config, self.policy)
        unknown = [name for name in WITHOUT_WORDS if self.loss.get(name)]
        if self.loss_config.truncated_importance_sampling_type == "seq-mask-tis":
            unknown.append("truncated_importance_sampling_type='seq-mask-tis'")
        if unknown:
            raise UserError(f"the conventions cannot express {', '.join(unknown)}")

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        return conventions_of(self.loss_config, self.advantage_config, self.policy)

    def configured(self, **changes: Any) -> Self:
        return type(self)(*settings_for(self.loss, self.advantage, self.policy, self.conventions, changes))

    @cached_property
    def loss_config(self) -> Any:
        """NeMo RL's `ClippedPGLossConfig`."""
        from nemo_rl.algorithms.loss import ClippedPGLossConfig

        return ClippedPGLossConfig(**self.loss)

    @cached_property
    def advantage_config(self) -> Any:
        """NeMo RL's `AdvEstimatorConfig`."""
        from nemo_rl.algorithms.advantage_estimator import AdvEstimatorConfig

        return AdvEstimatorConfig(**self.advantage)
